"""The harm of each drill, how long it lasts, and what clients may see of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from scripts.mock_engine import Fault

MAX_GAP_S = 5.0
"""The time until a stream resumes whose decode engine froze."""
MAX_WAIT_S = 7.0
FREEZE_S = 9.0
"""Longer than clients may wait, so that a router that only waits for the end is found out."""


class Blow(StrEnum):
    """The harm that is done to a process from outside."""

    KILL = "kill"
    RESTART = "restart"
    """Killed, and started again at once, before any probe."""
    STOP = "stop"
    """Asked to end, which cuts off its answers, and started again."""
    FREEZE = "freeze"
    HANDOVER = "handover"
    """A second router takes over, and the first is asked to end."""


class Mode(StrEnum):
    UNARY = "unary"
    STREAMED = "streamed"
    MIXED = "mixed"


class Engines(StrEnum):
    MOCK = "mock"
    REFERENCE = "reference"
    STOCK = "stock"
    """Unmodified vLLM on a CPU, without our plugin. They run only if they are asked for: see
    scripts/install_vllm."""


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    ROUTER = "router"


@dataclass(frozen=True, slots=True)
class Aim:
    """No error. `longest` bounds a client's wait, `silence` a gap within an answer, in seconds."""

    longest: float | None = None
    silence: float | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    """`seconds` is the shortest time that the harm lasts, `after` how long the load continues."""

    name: str
    role: Role
    harm: Fault | Blow
    everyone: bool = False
    seconds: float = 0.0
    after: float = 1.0
    aim: Aim = Aim()
    aim_of_streams: Aim | None = None
    chunks: int = 10
    interval: float = 0.02
    engines: Engines = Engines.MOCK
    restarts: bool = True
    """The drill restarts a killed engine under load. It does not restart vLLM, which takes minutes
    to start while other engines use the same cores."""

    def aim_in(self, mode: Mode) -> Aim:
        return self.aim if mode is Mode.UNARY else self.aim_of_streams or self.aim

    @property
    def modes(self) -> tuple[Mode, ...]:
        return (U, S) if self.engines is Engines.MOCK else (Mode.MIXED,)


NOT_FROZEN = Aim(longest=MAX_WAIT_S)
STREAM_NOT_FROZEN = Aim(longest=MAX_WAIT_S, silence=MAX_GAP_S)
FREEZE = (Blow.FREEZE, False, FREEZE_S)
P, D = Role.PREFILL, Role.DECODE
REFERENCE, STOCK = Engines.REFERENCE, Engines.STOCK
U, S = Mode.UNARY, Mode.STREAMED


def scenarios() -> Mapping[str, Scenario]:
    made = [
        Scenario("kill-p", P, Blow.KILL),
        Scenario("kill-d", D, Blow.KILL),
        Scenario("restart-p", P, Blow.RESTART),
        Scenario("restart-d", D, Blow.RESTART),
        Scenario("freeze-p", P, *FREEZE, aim=NOT_FROZEN),
        Scenario("freeze-d", D, *FREEZE, aim=NOT_FROZEN, aim_of_streams=STREAM_NOT_FROZEN),
        Scenario("error-p", P, Fault.ERROR),
        Scenario("error-d", D, Fault.ERROR),
        Scenario("silent-p", P, Fault.SILENT, seconds=5.0, aim=NOT_FROZEN),
        Scenario("busy-p", P, Fault.BUSY),
        Scenario("busy-d", D, Fault.BUSY),
        Scenario("rubbish-p", P, Fault.RUBBISH),
        Scenario("rubbish-d", D, Fault.RUBBISH),
        Scenario("reset-p", P, Fault.RESET),
        Scenario("reset-d", D, Fault.RESET),
        Scenario("slow-p", P, Fault.SLOW),
        Scenario("no-prefillers", P, Blow.KILL, everyone=True),
        Scenario("router-restart", Role.ROUTER, Blow.HANDOVER, after=4.0, chunks=60, interval=0.05),
        Scenario("real-kill-p", P, Blow.KILL, engines=REFERENCE),
        Scenario("real-kill-d", D, Blow.KILL, engines=REFERENCE),
        Scenario("real-stop-d", D, Blow.STOP, engines=REFERENCE),
        Scenario("real-freeze-d", D, *FREEZE, aim_of_streams=STREAM_NOT_FROZEN, engines=REFERENCE),
        Scenario("stock-kill-p", P, Blow.KILL, engines=STOCK, restarts=False),
        Scenario("stock-kill-d", D, Blow.KILL, engines=STOCK, restarts=False),
        Scenario("stock-freeze-d", D, *FREEZE, aim_of_streams=STREAM_NOT_FROZEN, engines=STOCK),
    ]
    return {scenario.name: scenario for scenario in made}


SHORT = (
    *(("freeze-d", U), ("freeze-d", S), ("silent-p", U), ("router-restart", S)),
    *(("kill-d", U), ("kill-d", S), ("kill-p", U), ("error-p", S), ("error-d", U)),
    *(("busy-p", U), ("busy-d", S), ("rubbish-p", U), ("no-prefillers", S)),
)
"""The longest first, so that runs side by side end together."""
