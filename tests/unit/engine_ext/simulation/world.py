"""A simulated NIXL with engines on it, on a clock that tests move; deterministic from a seed.

It is as unkind as the real one may be, see weather.py and agents.py. Around each agent stands a
small engine with a pool whose blocks are refilled as soon as they are free, see engine.py. Checked
at every event, whatever goes wrong:

1. No block is given back while anything may still read or write it: a transfer that NIXL has not
   ended, another's WRITE that will land, a reader whose horizon has not passed.
2. No engine accepts bytes of a block that was refilled.
3. Every lease and every load is reported once, and never for a request that has none.

and, once the weather is good again and time has passed (`settle`):

4. Every block is back, nothing is open, everything was reported, and the outcomes of leases add up
   to those that were granted.
"""

from collections.abc import Callable
from typing import Any

from engine_ext.common.config import ConnectorConfig
from tests.unit.engine_ext.simulation.engine import (
    GEOMETRY,
    NEWER,
    OLDER,
    OURS,
    REGIONS,
    SimEngine,
    SimRequest,
    has_landed,
)
from tests.unit.engine_ext.simulation.memory import BLOCK_SIZE, NUM_BLOCKS, contents_of
from tests.unit.engine_ext.simulation.network import Network
from tests.unit.engine_ext.simulation.timeline import Violation
from tests.unit.engine_ext.simulation.weather import CALM, Weather


class World:
    """A network and the engines on it."""

    def __init__(self, seed: int = 0) -> None:
        self.network = Network(seed)
        self.engines: dict[str, SimEngine] = {}
        """By name; a dead one stays until another takes its name."""
        self.network.timeline.check = self.check

    @property
    def now(self) -> float:
        return self.network.now

    def engine(
        self,
        name: str,
        mode: str = "pull",
        port: int = 1,
        *,
        clock: tuple[float, float] | None = None,
        version: int | None = OURS,
        make: Callable[..., SimEngine] = SimEngine,
        **config: Any,
    ) -> SimEngine:
        """`clock`: rate and origin. Left out: others than any other engine's."""
        made = ConnectorConfig(engine_id=name, transfer_mode=mode, **config)  # type: ignore[arg-type] # the two modes
        rate, origin = clock or self._any_clock(name)
        engine = make(self.network, made, port, version=version, rate=rate, origin=origin)
        engine.may_free = self._check_horizons
        self.engines[name] = engine
        return engine

    def check(self) -> None:
        if self.network.violations:
            lines = "\n".join(self.network.trace.lines(last=60))
            raise Violation(f"{self.network.violations[0]}\n{lines}")

    def pass_time(self, seconds: float) -> None:
        """Everybody steps now, when something happens to him, and from time to time."""
        for engine in self.engines.values():
            engine.wake()
        self.network.timeline.run_until(self.now + seconds)

    def until(self, condition: Callable[[], object], within: float = 5.0) -> None:
        """Passes time until then; fails when it takes longer than `within` seconds."""
        deadline = self.now + within
        while not condition():
            assert self.now < deadline, f"not reached within {within:g} s"
            self.pass_time(0.05)

    def settle(self, within: float) -> None:
        """The weather is good from now on: everything comes to its end."""
        self.network.weather = CALM
        deadline = self.now + within
        while not self.is_at_rest() and self.now < deadline:
            self.network.timeline.run_until(self.now + 2.0)
        self.assert_settled()

    def is_at_rest(self) -> bool:
        return self.network.num_in_flight <= 0 and all(
            engine.is_at_rest() for engine in self.engines.values()
        )

    def assert_settled(self) -> None:
        for engine in self.engines.values():
            if engine.is_alive:
                self._assert_settled(engine)
        self.check()

    def _assert_settled(self, engine: SimEngine) -> None:
        name = engine.name
        endless = {t for t in self.network.transfers if t.agent is engine.agent}
        stuck = {block for transfer in endless for block in transfer.local}
        kept = sorted([*engine.loading, *engine.computing, *engine.running, *engine.held])
        for request_id in engine.awaiting:
            self.network.violate(name, f"{request_id} awaits a loan for ever")
        excused = [one for one in kept if stuck & set(_request(engine, one).blocks)]
        for request_id in sorted(set(kept) - set(excused)):
            self.network.violate(name, f"{request_id} never came to its end")
        missing = NUM_BLOCKS - len(engine.free) - len(_blocks(engine, excused))
        if missing:
            self.network.violate(name, f"{missing} blocks never came back")
        # A transfer that never ends, the fence that waits for it, and the check of its report.
        num_void = sum(transfer.is_void for transfer in endless)
        if engine.loop.num_open > 3 * len(excused) + num_void:
            self.network.violate(name, f"num_open stays at {engine.loop.num_open}")
        stats = engine.stats
        outcomes = stats.leases_released + stats.leases_expired + stats.leases_revoked
        if not 0 <= stats.leases_granted - outcomes <= stats.leases_active:
            what = f"{stats.leases_granted} leases granted, {outcomes} outcomes counted"
            self.network.violate(name, what)
        if engine.stats.quarantined_blocks_active < len(_blocks(engine, excused)) > 0:
            self.network.violate(name, "blocks that are kept for ever are not counted")

    def _check_horizons(self, holder: SimEngine, request: SimRequest) -> None:
        """Report a reader that still relies on the lease when the holder takes its blocks back.

        The end of a READ ends the lease for all requests of its reader. A reader that is frozen
        when NIXL has sent that message does nothing before it has noted the end.
        """
        lease = (holder.name, request.request_id)
        for reader in self.engines.values():
            own = [one for one in reader.loading.values() if one.lease == lease]
            has_confirmed = reader.agent.is_frozen and any(map(has_landed, own))
            for waiting in own if reader.is_alive and not has_confirmed else ():
                if waiting.is_over or has_landed(waiting):
                    continue
                left = reader.horizon(waiting.request_id) - reader.shown()
                if left > 0:
                    what = f"{request.request_id}'s blocks while {reader} trusts it {left:.1f} s"
                    self.network.violate(holder.agent.name, f"gave back {what} more")

    def _any_clock(self, name: str) -> tuple[float, float]:
        rate, origin = self.network.dice.roll(f"clock of {name}", 2)
        # Two of them differ by a twentieth at most, which is what we count on.
        return 0.976 + 0.048 * rate, round(1e6 * origin)


def _request(engine: SimEngine, request_id: str) -> SimRequest:
    return next(
        where[request_id]
        for where in (engine.loading, engine.computing, engine.running, engine.held)
        if request_id in where
    )


def _blocks(engine: SimEngine, request_ids: list[str]) -> list[int]:
    return [block for one in request_ids for block in _request(engine, one).blocks]


__all__ = [
    "BLOCK_SIZE",
    "CALM",
    "GEOMETRY",
    "NEWER",
    "NUM_BLOCKS",
    "OLDER",
    "OURS",
    "REGIONS",
    "SimEngine",
    "SimRequest",
    "Violation",
    "Weather",
    "World",
    "contents_of",
]
