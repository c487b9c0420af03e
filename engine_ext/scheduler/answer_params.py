"""The `kv_transfer_params` of an answer whose KV this engine holds: the place of the blocks, in the
fields of vLLM 0.32, and prefix hashes of their tokens (`prefix_proof`).
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from engine_ext.common import resume_payload
from engine_ext.common.config import TransferMode
from engine_ext.common.prefix_hashes import Keys, PrefixHashes
from engine_ext.common.resume_payload import ResumePayload
from engine_ext.common.types import BlockIds, CacheGeometry, EngineIdentity, EngineRequest
from engine_ext.layout.plan import without_holes


class AnswerParams:
    def __init__(
        self,
        identity: EngineIdentity,
        geometry: CacheGeometry,
        mode: TransferMode,
        unix_time: Callable[[], float],
    ) -> None:
        self._identity = identity
        self._block_size = geometry.block_size
        self._block_sizes = geometry.block_sizes
        self._windows = geometry.group_windows
        self._mode = mode
        self._unix_time = unix_time

    def for_prefill(
        self, request: EngineRequest, keys: Keys, block_ids: BlockIds, hands_over: bool = False
    ) -> dict[str, Any]:
        """Return the params of a prefill engine's answer.

        The hashes cover the tokens in our blocks, usually the prompt. A decode engine does not load
        the tokens that it generates itself.
        """
        place = self._place_of(request, block_ids)
        generated = {resume_payload.KEY: _resume_payload(request)} if hands_over else {}
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            **place,
            "remote_blocks_expiry_time": None,
            "prefix_proof": _prefix_hashes(request, keys, place),
            **generated,
        }

    def for_turn(
        self,
        request: EngineRequest,
        keys: Keys,
        block_ids: BlockIds,
        seconds: float,
        *,
        is_firm: bool,
    ) -> dict[str, Any]:
        """Return the params of a retained turn.

        A turn that is not firm may be dropped at any time. Stock readers cannot learn of that, so
        for them the expiry time of such a turn has already passed.
        """
        place = self._place_of(request, block_ids)
        return {
            "do_remote_prefill": False,
            "do_remote_decode": True,
            **place,
            # Stock's readers compare it with this process's clock, whose offset they measured.
            "remote_blocks_expiry_time": time.perf_counter() + seconds if is_firm else 0.0,
            "revocable": not is_firm,
            "retained_until": self._unix_time() + seconds,
            "prefix_proof": _prefix_hashes(request, keys, place),
        }

    def list_blocks(self, request: EngineRequest, block_ids: BlockIds) -> BlockIds:
        """Return the blocks that hold the request's KV, in the form that readers receive."""
        sizes = zip(block_ids, self._block_sizes, strict=True)
        held = tuple(ids[: -(-request.num_computed_tokens // size)] for ids, size in sizes)
        return without_holes(held, self._windows)

    def _place_of(self, request: EngineRequest, block_ids: BlockIds) -> dict[str, Any]:
        num_tokens = request.num_computed_tokens
        return {
            "remote_block_ids": [list(group) for group in self.list_blocks(request, block_ids)],
            "remote_engine_id": self._identity.engine_id,
            "remote_request_id": request.request_id,
            "remote_host": self._identity.host,
            "remote_port": self._identity.port,
            "tp_size": self._identity.tp_size,
            "dcp_size": 1,
            "pp_size": self._identity.pp_size,
            "remote_num_tokens": num_tokens,
            "transfer_mode": self._mode,
            "remote_block_size": self._block_size,
        }


def _resume_payload(request: EngineRequest) -> dict[str, Any]:
    prompt = tuple(request.prompt_token_ids)
    return ResumePayload(prompt, tuple(request.token_ids[len(prompt) :])).to_wire()


def first_tokens(request: EngineRequest, num_tokens: int) -> Sequence[int]:
    """Return a list that begins with the request's first `num_tokens` tokens: the prompt's own
    where that is enough, because a host may copy all tokens at each read."""
    prompt = request.prompt_token_ids
    return prompt if num_tokens <= len(prompt) else request.token_ids


def _prefix_hashes(request: EngineRequest, keys: Keys, place: dict[str, Any]) -> dict[str, Any]:
    num_tokens = place["remote_num_tokens"]
    tokens = first_tokens(request, num_tokens)
    return PrefixHashes.of(tokens, keys, num_tokens).to_wire(place)
