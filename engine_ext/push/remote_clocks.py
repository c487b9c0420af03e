"""What other engines' clocks read at least, as far as they have told."""

from collections import OrderedDict
from dataclasses import dataclass

from engine_ext.common.latest import keep_latest
from engine_ext.worker.heartbeats import CLOCK_DRIFT

FRESH_WITHIN = 1.0
"""Seconds."""


@dataclass(frozen=True, slots=True)
class _Told:
    clock: float
    at: float


class RemoteClocks:
    """By agent. A clock that was told in a message read at least so much when the message came, and
    goes on at nearly our rate. Bounded: the one told longest ago is forgotten first."""

    LIMIT = 4096

    def __init__(self) -> None:
        self._told: OrderedDict[str, _Told] = OrderedDict()

    def reported(self, agent: str, clock: float, now: float) -> None:
        """A message came in which the agent's clock reads `clock`."""
        if clock < self.earliest(agent, now, default=clock):
            return  # Overtaken by another message.
        keep_latest(self._told, agent, _Told(clock, now), self.LIMIT)

    def knows(self, agent: str) -> bool:
        return agent in self._told

    def is_fresh(self, agent: str, now: float) -> bool:
        """What was told last is worth going by: `earliest` is behind by a second at most, besides
        what the message took."""
        told = self._told.get(agent)
        return told is not None and (now - told.at) * 2 * CLOCK_DRIFT <= FRESH_WITHIN

    def earliest(self, agent: str, now: float, default: float = 0.0) -> float:
        """The agent's clock reads at least this; `default` where it has told nothing."""
        told = self._told.get(agent)
        return default if told is None else told.clock + (now - told.at) * (1 - CLOCK_DRIFT)
