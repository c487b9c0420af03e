"""What an answer's `kv_transfer_params` say of the KV that is kept: where it lies, in vLLM 0.32's
words, and which tokens it is of, in ours."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from engine_ext.common import resume_payload
from engine_ext.common.config import TransferMode
from engine_ext.common.prefix_hashes import Keys, PrefixHashes
from engine_ext.common.resume_payload import ResumePayload
from engine_ext.common.types import BlockIds, CacheGeometry, EngineIdentity, EngineRequest
from engine_ext.layout.plan import without_holes


class Answers:
    def __init__(
        self,
        identity: EngineIdentity,
        geometry: CacheGeometry,
        mode: TransferMode,
        unix_time: Callable[[], float],
    ) -> None:
        self._identity = identity
        self._block_size = geometry.block_size
        self._windows = geometry.group_windows
        self._mode = mode
        self._unix_time = unix_time

    def of_prefill(
        self, request: EngineRequest, keys: Keys, block_ids: BlockIds, hands_over: bool = False
    ) -> dict[str, Any]:
        """The proof is of what stood in our blocks, as a rule the prompt: what D decodes itself it
        does not load."""
        where = self._where(request, block_ids)
        begins = {resume_payload.KEY: _begun(request)} if hands_over else {}
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            **where,
            "remote_blocks_expiry_time": None,
            "prefix_proof": _proof(request.token_ids, keys, where),
            **begins,
        }

    def of_turn(
        self,
        request: EngineRequest,
        keys: Keys,
        block_ids: BlockIds,
        seconds: float,
        *,
        is_firm: bool,
    ) -> dict[str, Any]:
        """A turn that is not firm may be dropped at any time. Stock readers cannot learn of that,
        so for them the expiry time of such a turn has already passed."""
        where = self._where(request, block_ids)
        return {
            "do_remote_prefill": False,
            "do_remote_decode": True,
            **where,
            # Stock's readers compare it with this process's clock, whose offset they measured.
            "remote_blocks_expiry_time": time.perf_counter() + seconds if is_firm else 0.0,
            "revocable": not is_firm,
            "retained_until": self._unix_time() + seconds,
            "prefix_proof": _proof(request.token_ids, keys, where),
        }

    def listed(self, request: EngineRequest, block_ids: BlockIds) -> BlockIds:
        """Return the blocks that hold the request's KV, in the form that readers receive."""
        num_blocks = -(-request.num_computed_tokens // self._block_size)
        held = tuple(group[:num_blocks] for group in block_ids)
        return without_holes(held, self._windows)

    def _where(self, request: EngineRequest, block_ids: BlockIds) -> dict[str, Any]:
        num_tokens = request.num_computed_tokens
        return {
            "remote_block_ids": [list(group) for group in self.listed(request, block_ids)],
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


def _begun(request: EngineRequest) -> dict[str, Any]:
    prompt = tuple(request.prompt_token_ids)
    return ResumePayload(prompt, tuple(request.token_ids[len(prompt) :])).to_wire()


def _proof(tokens: Sequence[int], keys: Keys, where: dict[str, Any]) -> dict[str, Any]:
    return PrefixHashes.of(tokens, keys, where["remote_num_tokens"]).to_wire(where)
