"""What is broken, for how long, and what clients may see of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from scripts.chaos_bench.faults import Blow, Fault, Harm

SPEAKS_AGAIN = 5.0
"""Seconds until a stream whose decoder froze goes on."""
FREEZE_SECONDS = 9.0
"""Longer than clients may wait, so that who merely waits for the thaw is found out."""
LONGEST = 7.0


class Mode(StrEnum):
    UNARY = "unary"
    STREAMED = "streamed"
    MIXED = "mixed"


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    ROUTER = "router"


@dataclass(frozen=True, slots=True)
class Aim:
    """No error; `longest` is a wait, `silence` one within an answer."""

    longest: float | None = None
    silence: float | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    """`seconds` is how long the harm lasts, at least; without an aim only WRONG is judged."""

    name: str
    role: Role
    harm: Harm
    everyone: bool = False
    seconds: float = 0.0
    after: float = 1.0
    aim: Aim | None = Aim()
    aim_of_streams: Aim | None = None
    chunks: int = 10
    interval: float = 0.02
    is_real: bool = False
    """In front of reference engines."""

    def aim_in(self, mode: Mode) -> Aim | None:
        return self.aim if mode is Mode.UNARY else self.aim_of_streams or self.aim

    @property
    def modes(self) -> tuple[Mode, ...]:
        return (Mode.MIXED,) if self.is_real else (U, S)


NOT_FROZEN = Aim(longest=LONGEST)
STREAM_NOT_FROZEN = Aim(longest=LONGEST, silence=SPEAKS_AGAIN)
FREEZE = (Blow.FREEZE, False, FREEZE_SECONDS)
P, D = Role.PREFILL, Role.DECODE
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
        Scenario("real-kill-p", P, Blow.KILL, is_real=True),
        Scenario("real-kill-d", D, Blow.KILL, is_real=True),
        Scenario("real-stop-d", D, Blow.STOP, is_real=True),
        Scenario("real-freeze-d", D, *FREEZE, aim_of_streams=STREAM_NOT_FROZEN, is_real=True),
    ]
    return {scenario.name: scenario for scenario in made}


SHORT = (
    *(("freeze-d", U), ("freeze-d", S), ("silent-p", U), ("router-restart", S)),
    *(("kill-d", U), ("kill-d", S), ("kill-p", U), ("error-p", S), ("error-d", U)),
    *(("busy-p", U), ("busy-d", S), ("rubbish-p", U), ("no-prefillers", S)),
)
"""The longest first, so that all lanes end together."""
