"""Push mode on P: decode engines that wait to hear that we hold a prompt.

Each asks again every few seconds; one that does not is forgotten. It is answered when the prompt is
offered, or when it is known that it never will be.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from engine_ext.common.request_names import names_of
from engine_ext.push.matching_state import NameTable, are_different
from engine_ext.wire.notifications import AwaitPrompt, PromptReady
from engine_ext.worker.reply_channels import ReplyChannels

FORGET_SECONDS = 15.0
"""Decode engines ask again within a third of that."""


class _Key(NamedTuple):
    sender: str
    request_id: str


@dataclass(slots=True)
class Inquiry:
    message: AwaitPrompt
    sender: str
    until: float
    """It is forgotten then, unless it comes again."""
    unknown_since: float
    """Since when we have had no request of its names."""

    @property
    def key(self) -> _Key:
        return _Key(self.sender, self.message.request_id)

    @property
    def names(self) -> tuple[str, ...]:
        message = self.message
        return names_of(message.request_id, message.transfer_id, message.remote_request_id)

    def may_mean(self, transfer_id: str | None) -> bool:
        """As far as the router's names say."""
        return not are_different(self.message.transfer_id, transfer_id)


class IncomingInquiries:
    """Bounded. A decode engine that has too many loses its oldest one; where there are too many in
    all, it is the engine that has most. What is lost comes again."""

    LIMIT = 8192
    LIMIT_BY_SENDER = 2048

    def __init__(self, channels: ReplyChannels) -> None:
        self._channels = channels
        self._open: dict[str, OrderedDict[str, Inquiry]] = {}
        """By sender and D's id, the one that came longest ago first."""
        self._num_open = 0
        self._names: NameTable[_Key] = NameTable()

    def __len__(self) -> int:
        return self._num_open

    def __iter__(self) -> Iterator[Inquiry]:
        """Of those that are open now, whatever becomes of them meanwhile."""
        return iter(list(chain.from_iterable(each.values() for each in self._open.values())))

    def hear(self, message: AwaitPrompt, sender: str, now: float) -> Inquiry:
        """A message came, for the first time or again."""
        inquiry = Inquiry(message, sender, now + FORGET_SECONDS, now)
        of_sender = self._open.get(sender, OrderedDict[str, Inquiry]())
        known = of_sender.get(message.request_id)
        if known is not None:
            inquiry.unknown_since = known.unknown_since
            self._forget(known)
        elif len(of_sender) >= self.LIMIT_BY_SENDER:
            self._forget_oldest(sender)
        elif self._num_open >= self.LIMIT:
            self._forget_oldest(max(self._open, key=lambda name: len(self._open[name])))
        self._open.setdefault(sender, OrderedDict())[message.request_id] = inquiry
        self._num_open += 1
        self._names.add(inquiry.key, inquiry.names)
        return inquiry

    def named(self, names: tuple[str, ...]) -> list[Inquiry]:
        return [self._open[sender][name] for sender, name in self._names.find(names)]

    def answer(self, inquiry: Inquiry) -> None:
        """Lost, it is asked for again."""
        self._forget(inquiry)
        self._channels.answer(inquiry.sender, PromptReady(inquiry.message.request_id))

    def forget_old(self, now: float) -> None:
        for inquiry in self:
            if inquiry.until <= now:
                self._forget(inquiry)

    def _forget_oldest(self, sender: str) -> None:
        self._forget(next(iter(self._open[sender].values())))

    def _forget(self, inquiry: Inquiry) -> None:
        of_sender = self._open[inquiry.sender]
        del of_sender[inquiry.message.request_id]
        if not of_sender:
            del self._open[inquiry.sender]
        self._num_open -= 1
        self._names.remove(inquiry.key)
