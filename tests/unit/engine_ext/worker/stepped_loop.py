"""The owner thread's loop, stepped by hand, with a fake agent and a fake clock."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from engine_ext.common.config import ConnectorConfig
from engine_ext.common.orders import StepMetadata
from engine_ext.common.types import CacheGeometry, ConnectorStats, EngineIdentity, Region
from engine_ext.connector import push_of
from engine_ext.worker.context import WorkerContext
from engine_ext.worker.loop import TransferLoop
from engine_ext.worker.results import PendingResults
from tests.unit.engine_ext.scheduler.fakes import FakeAgent
from tests.unit.engine_ext.wire.waiting import SECONDS


class SteppedLoop:
    def __init__(
        self,
        config: ConnectorConfig,
        identity: EngineIdentity,
        geometry: CacheGeometry,
        regions: Sequence[Region],
        agent: FakeAgent | None = None,
        **context: Any,
    ) -> None:
        self.config = config
        self.geometry = geometry
        self.agent = agent or FakeAgent()
        self.results = PendingResults()
        self.stats: ConnectorStats = context.pop("stats", None) or ConnectorStats()
        self.now = 1000.0
        self.loop = TransferLoop(
            WorkerContext(
                agent=self.agent,
                config=config,
                geometry=geometry,
                identity=identity,
                regions=tuple(regions),
                clock=lambda: self.now,
                results=self.results,
                stats=self.stats,
                **context,
            ),
            open_push=push_of(config),
        )

    def step(self, seconds: float = 0.0) -> float:
        self.now += seconds
        return self.loop.step(self.now)

    def apply(self, meta: StepMetadata) -> None:
        self.loop.apply(meta, self.now)

    def step_until(self, condition: Callable[[], object]) -> None:
        """Real time passes for the sockets, none on the loop's clock."""
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, "condition not reached"
            self.step()
