"""The buffer of a stream that another engine continues by a request like the client's."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import orjson

from router.openai.answers import Json, json_events
from router.openai.errors import EngineError, event_of
from router.proxy.resume_buffer import ResumeBuffer


class NotContinuedError(Exception):
    """An engine wrote something else than the rest of the answer."""


class RequestBuffer(ResumeBuffer):
    """A resume buffer whose subclass rewrites the events of the engine that continues."""

    __slots__ = ()
    by_request: ClassVar[bool] = True

    @abstractmethod
    def _rewrite(self, written: bytes, content: Json) -> bytes:
        """Return what the client gets of an event. `written`: the event; `content`: its data.

        Raises NotContinuedError, and orjson.JSONEncodeError for data that are nested too deep.
        """

    def _rewritten(self, block: bytes) -> bytes:
        """Return the events of a block, rewritten up to one that does not continue the answer."""
        passes, at = b"", 0
        for event, content in json_events(block, at_end=True):
            passes += block[at : event.start]
            at = event.end
            try:
                passes += self._rewrite(block[event.start : event.end], content)
            except (NotContinuedError, orjson.JSONEncodeError):
                self._give_up()
                return passes
        return passes + block[at:]

    def _give_up(self) -> None:
        """End the stream with an error. No engine continues it."""
        self.error = event_of(EngineError("an engine did not continue this answer"))
        self.is_cut = self.is_full = True
