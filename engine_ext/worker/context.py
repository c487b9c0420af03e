"""What the parts of the owner thread share."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine_ext.common.config import ConnectorConfig
from engine_ext.common.types import CacheGeometry, Clock, ConnectorStats, EngineIdentity, Region
from engine_ext.layout.ranks import TensorRank
from engine_ext.wire.dialer import Dialer
from engine_ext.worker.agent import Agent
from engine_ext.worker.results import PendingResults, TransferLog
from engine_ext.worker.validator import TRUSTING, Validator


@dataclass(kw_only=True, slots=True)
class WorkerContext:
    """One worker's agent, settings and memory, and where its parts report. Built once per rank."""

    agent: Agent
    config: ConnectorConfig
    geometry: CacheGeometry
    identity: EngineIdentity
    regions: tuple[Region, ...]
    clock: Clock
    """Seconds, monotonic."""
    results: PendingResults = field(default_factory=PendingResults)
    stats: ConnectorStats = field(default_factory=ConnectorStats)
    dialer: Dialer | None = None
    """By default TCP."""
    validator: Validator = TRUSTING
    """Of NIXL metadata that is not authenticated."""
    log: TransferLog = field(init=False)
    sequence: Iterator[int] = field(init=False)
    """Numbers for messages that are answered. A number is never used twice."""
    rank: TensorRank = field(init=False)
    max_quarantined: int = field(init=False)
    """In blocks: with more than these in quarantine, nothing new is loaded."""

    def __post_init__(self) -> None:
        self.log = TransferLog(self.clock)
        self.sequence = itertools.count(1)
        self.rank = TensorRank(self.geometry.tp_rank, self.identity.tp_size)
        share = self.config.quarantine_share
        self.max_quarantined = int(share * self.geometry.num_blocks)
