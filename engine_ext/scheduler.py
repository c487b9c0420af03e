"""The scheduler half: what to lease, what to load, what to renew. No I/O, no clock, no threads.

It fills the next `StepMetadata` and remembers, per request, how far its transfer is:

    D: offered --(allocated, tokens to load)--> loading --(reported)--> used
          +------(allocated, nothing to load; finished)--> used, and P is told
    P: expected --(finished with KV)--> leased --(reported)--> gone
          +-----(aborted)--> gone
"""

import enum
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine_ext.params import Role, parse
from engine_ext.types import (
    EMPTY_STEP,
    BlockIds,
    CacheGeometry,
    EngineIdentity,
    EngineRequest,
    FinishDecision,
    FinishStatus,
    MatchedTokens,
    PullOrder,
    RemoteSource,
    StepMetadata,
    TrackOrder,
    TransferResults,
)
from engine_ext.wire import HandshakeServer, Rank

logger = logging.getLogger(__name__)

NOTHING = MatchedTokens(0, False)


class LoadState(enum.Enum):
    OFFERED = "offered"
    LOADING = "loading"
    USED = "used"


@dataclass(slots=True)
class Load:
    source: RemoteSource
    state: LoadState = LoadState.OFFERED


class SchedulerConnector:
    """See engine_ext.connector for who calls what when. A request makes no method raise."""

    def __init__(self, identity: EngineIdentity, geometry: CacheGeometry) -> None:
        self._identity = identity
        self._block_size = geometry.block_size
        self._loads: dict[str, Load] = {}
        self._expected: set[str] = set()
        self._leased: set[str] = set()
        self._listener: HandshakeServer | None = None
        self._clear()

    @property
    def num_leased(self) -> int:
        return len(self._leased)

    def set_handshake_metadata(self, payloads: Mapping[Rank, bytes]) -> None:
        """Starts the listener. Raises OSError when the side channel cannot be bound."""
        self._listener = HandshakeServer(self._identity.host, self._identity.port, payloads)

    def shutdown(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def on_new_request(self, request: EngineRequest) -> None:
        params = parse(request.kv_transfer_params)
        if params.problem is not None:
            logger.warning("request %s is served locally: %s", request.request_id, params.problem)
        if params.role is Role.PREFILL:
            self._expected.add(request.request_id)
            self._expects.append(request.request_id)
        elif params.source is not None:
            self._offer(request.request_id, params.source)

    def get_num_new_matched_tokens(
        self, request: EngineRequest, num_computed_tokens: int
    ) -> MatchedTokens:
        load = self._loads.get(request.request_id)
        if load is None or load.state is not LoadState.OFFERED:
            return NOTHING
        missing = self._loadable_tokens(load.source, request) - num_computed_tokens
        return MatchedTokens(missing, True) if missing > 0 else NOTHING

    def update_state_after_alloc(
        self, request: EngineRequest, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        load = self._loads.get(request.request_id)
        if load is None or load.state is not LoadState.OFFERED:
            return
        if num_external_tokens <= 0:
            self._decline(request.request_id, load)
            return
        last_token = self._loadable_tokens(load.source, request)
        first_token = last_token - num_external_tokens
        load.state = LoadState.LOADING
        self._pulls.append(
            PullOrder(
                request.request_id,
                load.source,
                block_ids,
                first_token - first_token % self._block_size,
                last_token,
            )
        )

    def has_pending_work(self) -> bool:
        """True while `build_connector_meta` has something to hand over."""
        return bool(
            self._expects
            or self._cancels
            or self._grants
            or self._tracks
            or self._pulls
            or self._untracks
            or self._releases
        )

    def build_connector_meta(self) -> StepMetadata:
        if not self.has_pending_work():
            return EMPTY_STEP
        meta = StepMetadata(
            expects=tuple(self._expects),
            cancels=tuple(self._cancels),
            grants=tuple(self._grants),
            tracks=tuple(self._tracks),
            pulls=tuple(self._pulls),
            untracks=tuple(self._untracks),
            releases=tuple(self._releases),
        )
        self._clear()
        return meta

    def update_connector_output(self, results: TransferResults) -> None:
        self._leased -= results.finished_sending
        for request_id in results.finished_recving:
            load = self._loads.get(request_id)
            if load is not None:
                load.state = LoadState.USED
                self._untracks.append(request_id)

    def request_finished(
        self, request: EngineRequest, block_ids: BlockIds, status: FinishStatus
    ) -> FinishDecision:
        load = self._loads.pop(request.request_id, None)
        if load is not None and load.state is LoadState.OFFERED:
            self._decline(request.request_id, load)
        elif load is not None and load.state is LoadState.LOADING:
            self._untracks.append(request.request_id)
        if request.request_id not in self._expected:
            return FinishDecision(False, None)
        self._expected.discard(request.request_id)
        if not status.leaves_kv or request.num_computed_tokens <= 0:
            self._cancels.append(request.request_id)
            return FinishDecision(False, None)
        self._leased.add(request.request_id)
        self._grants.append(request.request_id)
        return FinishDecision(True, self._answer(request, block_ids))

    def _offer(self, request_id: str, source: RemoteSource) -> None:
        if source.engine_id == self._identity.engine_id:
            # Both legs came to this engine: what is worth having is in our own prefix cache.
            self._releases.append(source)
            return
        self._loads[request_id] = Load(source)
        self._tracks.append(TrackOrder(request_id, source))

    def _decline(self, request_id: str, load: Load) -> None:
        load.state = LoadState.USED
        self._untracks.append(request_id)
        self._releases.append(load.source)

    def _loadable_tokens(self, source: RemoteSource, request: EngineRequest) -> int:
        """Tokens from position 0 that the remote's blocks can give this prompt."""
        held = min((len(group) for group in source.block_ids), default=0) * self._block_size
        if source.num_tokens is not None:
            held = min(held, source.num_tokens)
        return min(held, request.num_prompt_tokens)

    def _answer(self, request: EngineRequest, block_ids: BlockIds) -> dict[str, Any]:
        """P's `kv_transfer_params`, in vLLM 0.32's words, for the router to hand to D."""
        num_blocks = -(-request.num_computed_tokens // self._block_size)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(group[:num_blocks]) for group in block_ids],
            "remote_engine_id": self._identity.engine_id,
            "remote_request_id": request.request_id,
            "remote_host": self._identity.host,
            "remote_port": self._identity.port,
            "tp_size": self._identity.tp_size,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": request.num_computed_tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
        }

    def _clear(self) -> None:
        self._expects: list[str] = []
        self._cancels: list[str] = []
        self._grants: list[str] = []
        self._tracks: list[TrackOrder] = []
        self._pulls: list[PullOrder] = []
        self._untracks: list[str] = []
        self._releases: list[RemoteSource] = []
