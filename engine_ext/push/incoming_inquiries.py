"""Push mode on P: decode engines that wait until P holds a prompt.

Each asks again every few seconds; an inquiry that is not repeated is forgotten. It is answered when
the prompt is offered, or when it is known that it never will be.
"""

from dataclasses import dataclass

from engine_ext.common.request_names import names_of
from engine_ext.push.matching_state import FairTable, NameTable, are_different
from engine_ext.wire.notifications import AwaitPrompt, PromptReady
from engine_ext.worker.reply_channels import ReplyChannels

FORGET_SECONDS = 15.0
"""Decode engines ask again within a third of that."""


@dataclass(slots=True)
class Inquiry:
    message: AwaitPrompt
    sender: str
    until: float
    """It is forgotten then, unless it comes again."""
    unknown_since: float
    """Since when P has had no request of its names."""

    @property
    def key(self) -> tuple[str, str]:
        return self.sender, self.message.request_id

    @property
    def names(self) -> tuple[str, ...]:
        message = self.message
        return names_of(message.request_id, message.transfer_id, message.remote_request_id)

    def may_mean(self, transfer_id: str | None) -> bool:
        """The router's names do not exclude it."""
        return not are_different(self.message.transfer_id, transfer_id)


class IncomingInquiries(FairTable[str, Inquiry]):
    """By sender and D's request id. An inquiry that had to make room comes again."""

    LIMIT = 8192
    LIMIT_BY_SENDER = 2048

    def __init__(self, channels: ReplyChannels) -> None:
        super().__init__()
        self._channels = channels
        self._names: NameTable[tuple[str, str]] = NameTable()

    def receive(self, message: AwaitPrompt, sender: str, now: float) -> Inquiry:
        inquiry = Inquiry(message, sender, now + FORGET_SECONDS, now)
        known = self.find(*inquiry.key)
        if known is not None:
            inquiry.unknown_since = known.unknown_since
            self._forget(known)
        displaced = self.add(*inquiry.key, inquiry)
        if displaced is not None:
            self._names.remove(displaced.key)
        self._names.add(inquiry.key, inquiry.names)
        return inquiry

    def named(self, names: tuple[str, ...]) -> list[Inquiry]:
        found = (self.find(*key) for key in self._names.find(names))
        return [inquiry for inquiry in found if inquiry is not None]

    def answer(self, inquiry: Inquiry) -> None:
        """Answer that D may register. If the message is lost, D sends its inquiry again."""
        self._forget(inquiry)
        self._channels.answer(inquiry.sender, PromptReady(inquiry.message.request_id))

    def forget_old(self, now: float) -> None:
        for inquiry in self:
            if inquiry.until <= now:
                self._forget(inquiry)

    def _forget(self, inquiry: Inquiry) -> None:
        self.pop(*inquiry.key)
        self._names.remove(inquiry.key)
