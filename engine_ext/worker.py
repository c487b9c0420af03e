"""The worker half: one thread that owns the NIXL agent and everything that moves.

The engine's thread hands over a `StepMetadata` and takes `TransferResults`; all else happens in
the owner thread, so that leases, heartbeats and reads go on while the engine computes or sleeps.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from engine_ext.agent import Agent, AgentError, NixlAgent
from engine_ext.config import ConnectorConfig
from engine_ext.lease import Beat, HeartbeatTracker, LeaseTable
from engine_ext.peer import PeerError, Peers
from engine_ext.pull import Pulls
from engine_ext.results import Results
from engine_ext.types import (
    CacheGeometry,
    ConnectorStats,
    EngineIdentity,
    Region,
    RemoteSource,
    StepMetadata,
    TransferResults,
)
from engine_ext.wire import (
    AgentMetadata,
    Heartbeat,
    ReadDone,
    decode_notification,
    encode_heartbeats,
    encode_payload,
    encode_read_done,
)

logger = logging.getLogger(__name__)

Clock = Callable[[], float]
AgentFactory = Callable[[Sequence[Region], ConnectorConfig], Agent]

READING_WAIT = 20e-6
RECENT_WAIT = 1e-3
LEASED_WAIT = 5e-3
IDLE_WAIT = 50e-3
RECENT = 0.25
"""Seconds during which a transfer or message makes the next one likely."""


def open_nixl(regions: Sequence[Region], config: ConnectorConfig) -> Agent:
    return NixlAgent(regions, config.backends, config.num_threads)


@dataclass(frozen=True, slots=True)
class Release:
    """Tell the remote that we will not read; dropped when no handshake succeeds."""

    source: RemoteSource


class TransferLoop:
    """Everything the owner thread does, one `step` at a time. Time is passed in."""

    def __init__(
        self,
        agent: Agent,
        config: ConnectorConfig,
        geometry: CacheGeometry,
        identity: EngineIdentity,
        regions: tuple[Region, ...],
        results: Results,
        stats: ConnectorStats,
    ) -> None:
        self._agent = agent
        self._identity = identity
        self._results = results
        self._stats = stats
        self._leases = LeaseTable(config.lease_duration, config.lease_extension)
        self._beats = HeartbeatTracker(config.heartbeat_interval)
        self._peers = Peers(agent, config, geometry, regions, identity.compat_factors, stats)
        self._pulls = Pulls(agent, self._peers, results, config, geometry, regions, stats)
        self._releases: list[Release] = []
        self._last_event = float("-inf")

    def apply(self, meta: StepMetadata, now: float) -> None:
        self._last_event = now
        for request_id in meta.expects:
            self._leases.expect(request_id)
        for request_id in meta.cancels:
            self._leases.cancel(request_id)
        for request_id in meta.grants:
            self._grant(request_id, now)
        for track in meta.tracks:
            self._beats.track(track.request_id, track.source, now)
        for order in meta.pulls:
            self._pulls.start(order)
        for request_id in meta.untracks:
            self._beats.untrack(request_id)
        for source in meta.releases:
            self._release(source)

    def step(self, now: float) -> float:
        """Moves everything on; returns the seconds after which it wants to be called again."""
        self._receive(now)
        self._peers.step(now)
        self._pulls.step(now)
        self._send_releases(now)
        self._send_heartbeats(now)
        self._expire(now)
        self._stats.leases_active = self._leases.num_granted
        return self._wait(now)

    def close(self) -> None:
        self._peers.close()
        self._agent.close()

    def _wait(self, now: float) -> float:
        if self._pulls.num_reading:
            return READING_WAIT
        if self._peers.num_connecting or now - self._last_event < RECENT:
            return RECENT_WAIT
        return LEASED_WAIT if len(self._leases) or len(self._beats) else IDLE_WAIT

    def _receive(self, now: float) -> None:
        for message in self._notifications():
            self._last_event = now
            match decode_notification(message):
                case ReadDone(request_id, readers) if self._leases.knows(request_id):
                    self._read_done(request_id, readers)
                case Heartbeat(request_ids):
                    self._stats.heartbeats_received += 1
                    self._leases.renew(request_ids, now)
                case unknown:
                    self._stats.notifications_unknown += 1
                    logger.warning("ignored notification %.200r", unknown)

    def _notifications(self) -> list[bytes]:
        try:
            return self._agent.notifications()
        except AgentError as error:
            logger.warning("%s", error)
            return []

    def _grant(self, request_id: str, now: float) -> None:
        self._stats.leases_granted += 1
        if not self._leases.grant(request_id, now):
            self._end_lease(request_id)

    def _read_done(self, request_id: str, readers: int) -> None:
        if self._leases.release(request_id, readers):
            self._end_lease(request_id)

    def _end_lease(self, request_id: str) -> None:
        self._stats.leases_released += 1
        self._results.sent(request_id)

    def _expire(self, now: float) -> None:
        for request_id in self._leases.expire(now):
            logger.warning("request %s: lease expired, nobody read its blocks", request_id)
            self._stats.leases_expired += 1
            self._results.sent(request_id)

    def _release(self, source: RemoteSource) -> None:
        if source.engine_id == self._identity.engine_id:
            self._read_done(source.request_id, 1)
        else:
            self._releases.append(Release(source))

    def _send_releases(self, now: float) -> None:
        releases, self._releases = self._releases, []
        for release in releases:
            message = encode_read_done(release.source.request_id)
            if not self._send(release.source, [message], now):
                self._releases.append(release)

    def _send_heartbeats(self, now: float) -> None:
        for beat in self._beats.due(now):
            if not self._send(beat.source, encode_heartbeats(beat.remote_ids), now):
                self._beats.retry(beat.source, now)
            else:
                self._count_beat(beat)

    def _count_beat(self, beat: Beat) -> None:
        self._stats.heartbeats_sent += 1
        logger.debug("renewed %d leases on engine %s", len(beat.remote_ids), beat.source.engine_id)

    def _send(self, source: RemoteSource, messages: Iterable[bytes], now: float) -> bool:
        """False while the handshake runs: try again. A failure is logged and taken as sent."""
        try:
            peer = self._peers.connect(source, now)
            if peer is None:
                return False
            for message in messages:
                self._agent.notify(peer, message)
        except (PeerError, AgentError) as error:
            logger.warning("engine %s was not told: %s", source.engine_id, error)
        return True


class WorkerConnector:
    """See engine_ext.connector for who calls what when."""

    def __init__(
        self,
        config: ConnectorConfig,
        geometry: CacheGeometry,
        identity: EngineIdentity,
        open_agent: AgentFactory = open_nixl,
        clock: Clock = time.monotonic,
    ) -> None:
        self._config = config
        self._geometry = geometry
        self._identity = identity
        self._open_agent = open_agent
        self._clock = clock
        self._results = Results()
        self._stats = ConnectorStats()
        self._inbox: deque[StepMetadata] = deque()
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def set_wake(self, wake: Callable[[], None]) -> None:
        """`wake` is called from the owner thread whenever there are new results."""
        self._results.set_wake(wake)

    def register_kv_caches(self, regions: Sequence[Region]) -> None:
        """Registers the memory and starts the owner thread. Raises AgentError."""
        self._regions = tuple(regions)
        agent = self._open_agent(self._regions, self._config)
        self._payload = encode_payload(
            self._metadata(agent.metadata()), self._identity.compat_factors
        )
        loop = TransferLoop(
            agent,
            self._config,
            self._geometry,
            self._identity,
            self._regions,
            self._results,
            self._stats,
        )
        self._thread = threading.Thread(
            target=self._run, args=(loop,), name="kv-transfer", daemon=True
        )
        self._thread.start()

    def get_handshake_payload(self) -> bytes:
        """What the listener answers for this rank; after `register_kv_caches`."""
        return self._payload

    def start_load_kv(self, meta: StepMetadata) -> None:
        if meta:
            self._inbox.append(meta)
            self._wake.set()

    def get_transfer_results(self) -> TransferResults:
        return self._results.take()

    def stats(self) -> ConnectorStats:
        return replace(self._stats)

    def shutdown(self) -> None:
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=10)
            self._thread = None

    def _run(self, loop: TransferLoop) -> None:
        while not self._stop.is_set():
            try:
                wait = self._step(loop)
            except Exception:
                logger.exception("transfer loop")
                wait = IDLE_WAIT
            if wait < RECENT_WAIT:
                time.sleep(wait)
            else:
                self._wake.wait(wait)
                self._wake.clear()
        self._close(loop)

    def _step(self, loop: TransferLoop) -> float:
        now = self._clock()
        while self._inbox:
            loop.apply(self._inbox.popleft(), now)
        return loop.step(now)

    def _close(self, loop: TransferLoop) -> None:
        try:
            loop.close()
        except AgentError as error:
            logger.warning("%s", error)

    def _metadata(self, agent_metadata: bytes) -> AgentMetadata:
        regions = self._regions
        return AgentMetadata(
            engine_id=self._identity.engine_id,
            agent_metadata=agent_metadata,
            kv_caches_base_addr=[region.base_addr for region in regions],
            device_id=regions[0].device_id,
            num_blocks=self._geometry.num_blocks,
            block_lens=[region.block_len for region in regions],
            block_strides=[region.block_stride for region in regions],
            kv_cache_layout=self._geometry.kv_cache_layout,
            block_size=self._geometry.block_size,
            attn_backend_name=self._geometry.attn_backend_name,
            region_num_blocks=[region.num_blocks for region in regions],
            region_group_ids=[0] * len(regions),
            region_names=[region.name for region in regions],
            region_mem_types=[region.mem_type for region in regions],
            region_members=[[region.name] for region in regions],
        )
