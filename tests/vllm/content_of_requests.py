"""Runs inside vLLM's environment: how many tokens requests of the same ids share, by the proof and
by vLLM's own block hashes. Prints JSON: `names`, the matrices `proof` and `vllm`, and `nameless`,
what requests depend on that cannot be told."""

import json
import sys

import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from engine_ext.common.prefix_hashes import PrefixHashes
from engine_ext.vllm.request_view import RequestView

TOKENS = [7] * 32
BLOCK = 16


def image(content: str, offset: int, length: int = 6) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", content, PlaceholderRange(offset, length))


def adapter(name: str, path: str) -> LoRARequest:
    return LoRARequest(lora_name=name, lora_int_id=1, lora_path=path)


def request(**more: object) -> Request:
    hasher = get_request_block_hasher(BLOCK, sha256)
    sampling = SamplingParams(max_tokens=1)
    return Request("r", more.pop("prompt", TOKENS), sampling, None, block_hasher=hasher, **more)


ONE, OTHER = "1" * 64, "2" * 64
COUNTED = "renderer0-mm-1-image-0"
"""As vLLM names a medium when both of its caches are off."""
REQUESTS = {
    "plain": {},
    "salt": {"cache_salt": "x"},
    "another salt": {"cache_salt": "y"},
    "adapter": {"lora_request": adapter("a", "/a")},
    "another adapter": {"lora_request": adapter("b", "/a")},
    "adapter from elsewhere": {"lora_request": adapter("a", "/b")},
    "image": {"mm_features": [image(ONE, 3)]},
    "another image": {"mm_features": [image(OTHER, 3)]},
    "image elsewhere": {"mm_features": [image(ONE, 4)]},
    "image in the second block": {"mm_features": [image(ONE, 19)]},
    "two images": {"mm_features": [image(ONE, 3), image(OTHER, 19)]},
    "two images, swapped": {"mm_features": [image(OTHER, 3), image(ONE, 19)]},
    "image and salt": {"mm_features": [image(ONE, 3)], "cache_salt": "x"},
}


def proven(held: Request, wanted: Request) -> int:
    ours, theirs = (RequestView(one) for one in (held, wanted))
    proof = PrefixHashes.of(ours.token_ids, ours.content_keys or ())
    return proof.count_verified_tokens(theirs.prompt_token_ids, theirs.content_keys or ())


def shared_blocks(held: Request, wanted: Request) -> int:
    pairs = zip(held.block_hashes, wanted.block_hashes, strict=True)
    return BLOCK * next((i for i, (a, b) in enumerate(pairs) if a != b), len(held.block_hashes))


def main() -> None:
    init_none_hash(sha256)
    made = [request(**more) for more in REQUESTS.values()]
    again = [request(**more) for more in REQUESTS.values()]
    embeddings = request(prompt=None, prompt_embeds=torch.zeros(32, 4))
    nameless = {
        "embeddings": RequestView(embeddings),
        "a client's name": RequestView(request(mm_features=[image("cat", 3)])),
        "counted media": RequestView(request(mm_features=[image(COUNTED, 3)])),
    }
    answer = {
        "names": list(REQUESTS),
        "proof": [[proven(one, other) for other in again] for one in made],
        "vllm": [[shared_blocks(one, other) for other in again] for one in made],
        "nameless": {name: view.content_keys for name, view in nameless.items()},
    }
    json.dump(answer, sys.stdout)


main()
