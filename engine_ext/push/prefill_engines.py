"""Push mode on D: what it knows of prefill engines, and asks them before it takes blocks.

Clock
    P promises to begin no WRITE after a time on its own clock. D sets that time, and must know when
    it has passed. So D keeps a lower bound of P's clock, which each answer to a heartbeat carries.

Inquiry
    A request that takes no blocks before P holds its prompt inquires every few seconds
    (`AwaitPrompt`) until P answers that it holds the prompt or never will. Each inquiry ends in one
    report. It also ends when P is silent, gone, or does not answer inquiries: the request registers
    then, and its registration ends with the reason.
"""

import logging
from collections import OrderedDict
from dataclasses import dataclass, field

from engine_ext.common.latest import keep_latest
from engine_ext.common.log_rate_limit import LogRateLimit
from engine_ext.common.orders import PushInquiry
from engine_ext.wire.notifications import AwaitPrompt, encode_extension
from engine_ext.worker.agent import AgentError
from engine_ext.worker.heartbeats import CLOCK_DRIFT
from engine_ext.worker.leases import NEVER
from engine_ext.worker.peers import PeerError
from engine_ext.worker.push_component import LoopParts

logger = logging.getLogger(__name__)
logger.addFilter(LogRateLimit())

SILENT_BEATS = 3
SILENT_SECONDS = 3.0
"""A P that has answered none of so many heartbeats, for so long at least, is taken for dead."""
LONGEST_ASKING = 5.0
"""Most seconds between two messages to P, however long our own leases are."""
FRESH_SECONDS = 1.0
"""The most seconds by which a lower bound may be behind a clock that counts as known."""


@dataclass(frozen=True, slots=True)
class _Reading:
    clock: float
    at: float


class RemoteClocks:
    """By agent. When a message arrives, the clock reads at least what it reports, and continues at
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
        return reading is not None and (now - reading.at) * 2 * CLOCK_DRIFT <= FRESH_SECONDS

    def earliest(self, agent: str, now: float, default: float = 0.0) -> float:
        """The agent's clock reads at least this; `default` where it has reported nothing."""
        reading = self._readings.get(agent)
        return (
            default if reading is None else reading.clock + (now - reading.at) * (1 - CLOCK_DRIFT)
        )


@dataclass(slots=True)
class _OpenInquiry:
    inquiry: PushInquiry
    deadline: float
    ask_again_at: float = NEVER
    asked: set[str] = field(default_factory=set)
    """Agents of P's ranks."""
    answered: set[str] = field(default_factory=set)


class OutgoingInquiries:
    def __init__(self, parts: LoopParts) -> None:
        context = parts.context
        self._agent, self._results, self._stats = context.agent, context.results, context.stats
        self._peers, self._beats = parts.peers, parts.beats
        self._seconds = context.config.push_deadline
        self._asks_every = min(context.config.heartbeat_interval, LONGEST_ASKING)
        self._asking: dict[str, _OpenInquiry] = {}

    def __len__(self) -> int:
        return len(self._asking)

    def ask(self, inquiry: PushInquiry, now: float) -> None:
        self._stats.pushes_awaited += 1
        self._asking[inquiry.request_id] = _OpenInquiry(inquiry, now + self._seconds)

    def answered(self, request_id: str, sender: str) -> None:
        """That rank of P holds the prompt, or never will."""
        asking = self._asking.get(request_id)
        if asking is None or sender not in asking.asked:
            return
        asking.answered.add(sender)
        if asking.asked <= asking.answered:
            self.end(request_id)

    def end(self, request_id: str) -> None:
        """Report the request as ready to register, if it was inquired."""
        if self._asking.pop(request_id, None) is not None:
            self._results.ready(request_id)

    def step(self, now: float) -> None:
        for request_id, asking in list(self._asking.items()):
            try:
                is_open = self._ask_again(asking, now)
            except (PeerError, AgentError) as error:
                logger.warning("request %s: the inquiry did not reach P: %s", request_id, error)
                is_open = False
            except Exception:
                logger.exception("request %s", request_id)
                is_open = False
            if not is_open:
                self.end(request_id)

    def _ask_again(self, asking: _OpenInquiry, now: float) -> bool:
        """Return False if no answer can come."""
        address = asking.inquiry.target.address
        if asking.deadline <= now:
            return False
        if self._beats.is_silent(address, now, SILENT_BEATS, SILENT_SECONDS):
            return False
        if asking.ask_again_at > now:
            return True
        peers = self._peers.connect_all(address, now)
        if peers is None:
            return True
        if not all(peer.has_extension and peer.returns_blocks for peer in peers):
            return False
        asking.ask_again_at = now + self._asks_every
        asking.asked = {peer.name for peer in peers}
        asking.answered &= asking.asked
        for peer in peers:
            if peer.name not in asking.answered:
                self._agent.notify(peer.name, encode_extension(_message(asking.inquiry)))
        return True


def _message(inquiry: PushInquiry) -> AwaitPrompt:
    target = inquiry.target
    return AwaitPrompt(
        inquiry.request_id, inquiry.digest, target.remote_request_id, target.transfer_id
    )
