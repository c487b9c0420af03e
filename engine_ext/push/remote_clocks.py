"""Lower bounds of other engines' clocks.

P promises to begin no WRITE after a time on its own clock. D sets that time, and must know when it
has passed, so it keeps a lower bound of P's clock. Each answer to a heartbeat carries P's clock.
"""

from collections import OrderedDict
from dataclasses import dataclass

from engine_ext.common.latest import keep_latest
from engine_ext.worker.heartbeats import CLOCK_DRIFT

FRESH_WITHIN = 1.0
"""Seconds."""


@dataclass(frozen=True, slots=True)
class _Reading:
    clock: float
    at: float


class RemoteClocks:
    """By agent. A clock read at least what a message reports when the message came, and goes on at
    nearly our rate. Bounded: the one reported longest ago is forgotten first."""

    LIMIT = 4096

    def __init__(self) -> None:
        self._readings: OrderedDict[str, _Reading] = OrderedDict()

    def reported(self, agent: str, clock: float, now: float) -> None:
        """A message came in which the agent's clock reads `clock`."""
        if clock < self.earliest(agent, now, default=clock):
            return  # Overtaken by another message.
        keep_latest(self._readings, agent, _Reading(clock, now), self.LIMIT)

    def knows(self, agent: str) -> bool:
        return agent in self._readings

    def is_fresh(self, agent: str, now: float) -> bool:
        """`earliest` is behind by a second at most, besides the time that the message took."""
        reading = self._readings.get(agent)
        return reading is not None and (now - reading.at) * 2 * CLOCK_DRIFT <= FRESH_WITHIN

    def earliest(self, agent: str, now: float, default: float = 0.0) -> float:
        """The agent's clock reads at least this; `default` where it has reported nothing."""
        reading = self._readings.get(agent)
        return (
            default if reading is None else reading.clock + (now - reading.at) * (1 - CLOCK_DRIFT)
        )
