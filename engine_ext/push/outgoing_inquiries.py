"""Push mode on D: requests that take no blocks before P holds their prompts.

D asks every few seconds (`AwaitPrompt`) until P answers that it holds the prompt or never will.
Each inquiry ends in one report. It also ends when P is silent, gone, or does not answer inquiries:
the request registers then, and its registration ends with the reason.
"""

import logging
from dataclasses import dataclass, field

from engine_ext.common.log_rate_limit import LogRateLimit
from engine_ext.common.types import PushInquiry
from engine_ext.push.registrations import LONGEST_ASKING, SILENT_BEATS, SILENT_SECONDS
from engine_ext.wire.notifications import AwaitPrompt, encode_extension
from engine_ext.worker.agent import AgentError
from engine_ext.worker.leases import NEVER
from engine_ext.worker.peers import PeerError
from engine_ext.worker.push_component import LoopParts

logger = logging.getLogger(__name__)
logger.addFilter(LogRateLimit())


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
                logger.warning("request %s: P was not asked: %s", request_id, error)
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
