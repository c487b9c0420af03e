"""A vLLM request as the core reads it."""

import re
from collections.abc import Sequence
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.request import Request, RequestStatus

from engine_ext.common.prefix_hashes import ContentKey, Keys
from engine_ext.common.types import FinishStatus
from engine_ext.vllm import weights

_STATUS = {
    RequestStatus.FINISHED_STOPPED: FinishStatus.STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishStatus.LENGTH_CAPPED,
    RequestStatus.FINISHED_ABORTED: FinishStatus.ABORTED,
}


_CONTENT_HASH = re.compile(r"(^|:)([0-9a-f]{64}|[0-9a-f]{128})$")
"""SHA-256, BLAKE3 or SHA-512, behind the adapter's name where that changes the encoder."""


class RequestView:
    """Reads vLLM's request at each access. Only vLLM's view of all tokens is copied."""

    __slots__ = ("_request",)

    def __init__(self, request: Request) -> None:
        self._request = request

    @property
    def request_id(self) -> str:
        return str(self._request.request_id)

    @property
    def kv_transfer_params(self) -> Any:
        return self._request.kv_transfer_params

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """Empty for a prompt of embeddings, which has no content keys either."""
        return self._request.prompt_token_ids or ()

    @property
    def token_ids(self) -> Sequence[int]:
        """The prompt's list itself where there is no answer yet: a copy of a long prompt costs the
        scheduler a tenth of a millisecond, and so does each read through vLLM's view of all."""
        request = self._request
        if request.prompt_token_ids is not None and request.num_tokens == request.num_prompt_tokens:
            return request.prompt_token_ids
        tokens: list[int] = request.all_token_ids[:]
        return tokens

    @property
    def content_keys(self) -> Keys | None:
        """What vLLM hashes into its own prefix cache's blocks (`generate_block_hash_extra_keys`),
        but with absolute positions, and the weights that compute it where these can change, see
        weights.py. Embeddings have no name, nor has a medium whose identifier is no hash of its
        content: a client's own word, or vLLM's count of media where it caches none."""
        request = self._request
        media = [(one.identifier or "", one.mm_position) for one in request.mm_features]
        are_named = all(_CONTENT_HASH.search(name) for name, _ in media)
        if request.prompt_embeds is not None or not are_named:
            return None
        keys = weights.keys_of(request)
        if keys is None:
            return None
        salt = weights.salt_of(request)
        if salt:
            keys.append(ContentKey("cache_salt", (salt,)))
        for identifier, at in sorted(media, key=lambda medium: medium[1].offset):
            keys.append(ContentKey("mm", (identifier,), at.offset, at.offset + at.length))
        return keys

    @property
    def block_keys(self) -> Sequence[bytes]:
        """vLLM's hashes of the full blocks, if another engine's equal hashes mean equal KV. vLLM
        hashes an adapter's name and path, not its content, and knows no weights that were
        changed."""
        keys = self.content_keys
        if keys is None or any(key.kind in ("lora", "weights") for key in keys):
            return ()
        hashes: Sequence[bytes] = self._request.block_hashes
        return hashes

    @property
    def num_prompt_tokens(self) -> int:
        return int(self._request.num_prompt_tokens)

    @property
    def num_computed_tokens(self) -> int:
        """The tokens whose KV is written. vLLM counts a step's tokens when it schedules the step,
        which may still run when the request has ended. It also counts draft tokens behind the end
        of an answer, which are dropped."""
        request = self._request
        computed = int(request.num_computed_tokens - request.num_in_flight_tokens)
        return max(0, min(computed, int(request.num_tokens)))

    @property
    def finish_status(self) -> FinishStatus:
        return _STATUS.get(self._request.status, FinishStatus.ERROR)


def is_streamed(request: Request) -> bool:
    params = request.sampling_params
    return params is not None and params.output_kind is RequestOutputKind.DELTA


def back_off(request: Request, num_left: int) -> None:
    """Leave out the prompt's last tokens before anything is computed; see
    `SchedulerConnector.backs_off`. As in stock vLLM, a prompt whose log-probabilities are asked for
    stays whole."""
    if request.get_skip_reading_prefix_cache():
        return
    request.max_tokens = 1
    for _ in range(num_left):
        request.prompt_token_ids.pop()
        request._all_token_ids.pop()
        request.num_prompt_tokens -= 1
