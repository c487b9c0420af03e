"""The worker half: one thread that owns the NIXL agent and every transfer.

The engine's thread hands over a `StepMetadata` per step and takes `TransferResults`. Everything
else happens in the owner thread, so that leases, heartbeats and READs go on while the engine
computes or sleeps. See loop.py for what that thread does.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import msgspec

from engine_ext.common.clock import boottime
from engine_ext.common.config import ConnectorConfig
from engine_ext.common.inspection import Inspection
from engine_ext.common.orders import SaveOrder, StepMetadata
from engine_ext.common.support import (
    UnsupportedError,
    refuse_unsupported,
    refuse_unsupported_memory,
)
from engine_ext.common.types import (
    CacheGeometry,
    ConnectorStats,
    EngineIdentity,
    Region,
    TransferResults,
)
from engine_ext.wire.errors import EXTENSION_VERSION
from engine_ext.wire.handshake import AgentMetadata, encode_payload
from engine_ext.worker.agent import Agent, AgentError, NixlAgent
from engine_ext.worker.checksums import BlockMemory
from engine_ext.worker.context import WorkerContext
from engine_ext.worker.loop import IDLE_WAIT, RECENT_WAIT, TransferLoop
from engine_ext.worker.push_component import PushFactory
from engine_ext.worker.results import PendingResults
from engine_ext.worker.sealed import sealed
from engine_ext.worker.staging import StagedTransfers, StagingFactory
from engine_ext.worker.validator import open_validator

logger = logging.getLogger(__name__)

AgentFactory = Callable[[Sequence[Region], ConnectorConfig], Agent]

LAST_MESSAGES_SECONDS = 2.0
"""For messages that other engines need. A new connection for one takes until its metadata is
validated."""
LINGER_SECONDS = 0.2
"""After the last message: NIXL sends on a new connection only while it is polled."""
MAX_INSPECTIONS = 16
"""Requests that wait. One more displaces the oldest, which times out."""


def open_nixl(
    regions: Sequence[Region], config: ConnectorConfig, stats: ConnectorStats | None = None
) -> Agent:
    return NixlAgent(regions, config.backends, config.num_threads, stats)


class InspectionRequest(NamedTuple):
    request_id: str | None
    answer: "Future[Inspection]"


class WorkerConnector:
    """One per tensor rank. engine_ext/connector.py describes when the host calls what.

    Raises UnsupportedError for a model or a parallelism whose KV we cannot move.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        geometry: CacheGeometry,
        identity: EngineIdentity,
        open_agent: AgentFactory | None = None,
        *,
        open_push: PushFactory | None = None,
    ) -> None:
        refuse_unsupported(config, geometry, identity)
        self._config = config
        self._geometry = geometry
        self._identity = identity
        self._open_push = open_push
        self.results = PendingResults()
        """The owner thread adds results here, and the scheduler half's step takes them."""
        self._stats = ConnectorStats()
        self._open_agent = open_agent or partial(open_nixl, stats=self._stats)
        self.inbox: deque[StepMetadata] = deque()
        """Steps that the owner thread has not carried out yet."""
        self._inspections: deque[InspectionRequest] = deque(maxlen=MAX_INSPECTIONS)
        self._accepted: StepMetadata | None = None
        self._asleep = threading.Lock()
        """The owner thread waits for this lock: a wait costs half of an event's."""
        self._asleep.acquire()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._staged: StagedTransfers | None = None

    def set_wake(self, wake: Callable[[], None]) -> None:
        """`wake` is called from the owner thread whenever there are new results."""
        self.results.set_wake(wake)

    def register_kv_caches(
        self, regions: Sequence[Region], stage: StagingFactory | None = None
    ) -> None:
        """Register the memory and start the owner thread. `stage` makes the host buffers, where the
        geometry asks for them.

        Raises AgentError, and UnsupportedError for memory that does not go with the configuration.
        """
        if self._geometry.is_staged:
            if stage is None:
                raise UnsupportedError("this engine has no host buffers to stage its KV in")
            staging = stage(regions)
            self._staged = StagedTransfers(staging, self._geometry.block_size)
            regions = staging.regions
        self._regions = tuple(regions)
        refuse_unsupported_memory(self._config, self._geometry, self._regions)
        opened = self._open_agent(self._regions, self._config)
        validator = open_validator(opened, self._config, self._stats)
        agent = sealed(opened, self._config.access, self._stats)
        self._payload = encode_payload(
            self._metadata(agent.metadata()),
            self._identity.compat_factors,
            self._identity.compat_hash,
            # A stock engine of as many stages would read the first one's layers into each of its.
            # It names kernel blocks where we name blocks.
            is_for_stock=self._identity.pp_size == self._geometry.kernel_blocks == 1,
        )
        context = WorkerContext(
            agent=agent,
            config=self._config,
            geometry=self._geometry,
            identity=self._identity,
            regions=self._regions,
            clock=boottime,
            results=self.results,
            stats=self._stats,
            validator=validator,
        )
        loop = TransferLoop(context, open_push=self._open_push, blocks=self._device_blocks())
        self._thread = threading.Thread(
            target=self._run, args=(loop,), name="kv-transfer", daemon=True
        )
        self._thread.start()

    def get_handshake_payload(self) -> bytes:
        """Return this rank's answer to handshakes; after `register_kv_caches`."""
        return self._payload

    def start_load_kv(self, meta: StepMetadata) -> None:
        if meta:
            self.inbox.append(self._staged.begin(meta) if self._staged else meta)
            # The loop has it from here on, so `fail_loads` must not hand it over again.
            self._accepted = meta
            self._wake()

    def fail_loads(self, meta: StepMetadata) -> None:
        """`start_load_kv` raised. Unless it had handed over `meta`, fail its loads, and carry out
        its other orders."""
        if meta and meta is not self._accepted:
            self.inbox.append(meta.without_loads())
            self._accepted = meta
        self._wake()

    def wait_for_save(self, meta: StepMetadata) -> None:
        """After the step's forward pass, before its tokens leave the engine."""
        if self._staged:
            self._staged.save(meta.all(SaveOrder))

    def get_transfer_results(self) -> TransferResults:
        results = self.results.take()
        if not self._staged or not results:
            return results
        try:
            return self._staged.finish_loads(results)
        except Exception:
            logger.exception("loaded KV could not be copied from host memory")
            return replace(results, failed_recving=results.finished_recving)

    @property
    def has_results(self) -> bool:
        """True if `get_transfer_results` has something to return: an idle host takes a step."""
        return bool(self.results)

    def stats(self) -> ConnectorStats:
        return self._stats.snapshot()

    def inspect(self, request_id: str | None = None, seconds: float = 1.0) -> Inspection:
        """Return leases, quarantine and transfers as they are between two steps of the owner
        thread; leases and quarantine of one request only, if one is named. Any thread may call it.

        Raises TimeoutError.
        """
        inspection = InspectionRequest(request_id, Future())
        self._inspections.append(inspection)
        self._wake()
        return inspection.answer.result(seconds)

    def shutdown(self) -> None:
        """Send other engines their last messages, for two seconds at most, and end the thread."""
        self._stop.set()
        self._wake()
        if self._thread is not None:
            self._thread.join(timeout=10)
            self._thread = None

    def _wake(self) -> None:
        with suppress(RuntimeError):  # Another call has released it.
            self._asleep.release()

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
                self._asleep.acquire(timeout=wait)
        self._send_last_messages(loop)
        self._close(loop)

    def _step(self, loop: TransferLoop) -> float:
        now = boottime()
        while self.inbox:
            loop.apply(self.inbox.popleft(), now)
        while self._inspections:
            self._answer(loop, self._inspections.popleft(), now)
        return loop.step(now)

    @staticmethod
    def _answer(loop: TransferLoop, inspection: InspectionRequest, now: float) -> None:
        try:
            inspection.answer.set_result(loop.inspect(now, inspection.request_id))
        except Exception as error:
            inspection.answer.set_exception(error)

    def _send_last_messages(self, loop: TransferLoop) -> None:
        deadline = boottime() + LAST_MESSAGES_SECONDS
        try:
            self._step(loop)
            was_unsent = loop.has_unsent
            while loop.has_unsent and boottime() < deadline:
                time.sleep(RECENT_WAIT)
                self._step(loop)
            lingers_until = boottime() + LINGER_SECONDS if was_unsent else 0.0
            while boottime() < lingers_until:
                time.sleep(RECENT_WAIT)
                self._step(loop)
            loop.revoke_all(boottime())
        except Exception:
            logger.exception("last messages to other engines")

    def _close(self, loop: TransferLoop) -> None:
        try:
            loop.close()
        except AgentError as error:
            logger.warning("%s", error)

    def _device_blocks(self) -> BlockMemory | None:
        """Return how to read blocks that are not in host memory, for their checksums. Raises
        UnsupportedError where they cannot be."""
        first = self._regions[0]
        if not self._config.checksums or first.mem_type == "DRAM":
            return None
        try:
            from engine_ext.worker.torch_memory import DeviceBlocks

            blocks = DeviceBlocks(first.device_id)
            blocks.read(first, 0)
        except Exception as error:
            raise UnsupportedError(
                f"kv_checksum: this engine's KV memory cannot be read: {error}"
            ) from error
        return blocks

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
            physical_blocks_per_logical_kv_block=self._geometry.kernel_blocks,
            group_block_sizes=list(self._geometry.group_block_sizes) or None,
            group_kernel_sizes=list(self._geometry.group_kernel_sizes) or None,
            region_num_blocks=[region.num_blocks for region in regions],
            region_group_ids=[region.group for region in regions],
            region_names=[region.name for region in regions],
            region_mem_types=[region.mem_type for region in regions],
            region_members=msgspec.Raw(msgspec.msgpack.encode([[r.name] for r in regions])),
            disagg_ext=EXTENSION_VERSION,
            lease_extension=self._config.lease_extension,
            write_bound=self._config.write_bound,
            returns_blocks=True,
            block_layers=[list(region.layers) for region in regions],
            region_tenants=[list(region.tenants) for region in regions],
            tensor_rank=(self._geometry.tp_rank, self._identity.tp_size),
            state_sections=list(self._geometry.state_sections) or None,
        )
