"""Answers to a caller with limits: each says how much is left; streams' events are counted."""

from __future__ import annotations

from collections.abc import Sequence

from router.auth.authenticator import QuotaPermit
from router.http_client.engine_answer import AnswerSink
from router.http_client.errors import UpstreamError
from router.proxy.exchange import Before, Exchange, Header, Relayed

EVENT = b"data: {"
LIMIT = b"x-ratelimit-"


class Limited(Before):
    """An Exchange before another one. `lines` are whole headers."""

    def __init__(self, front: Exchange, permit: QuotaPermit, lines: Sequence[Header]) -> None:
        super().__init__(front)
        self._permit = permit
        self._lines = lines

    async def relay(
        self, status: int, headers: Sequence[Header], answer: Relayed, idle: float, latest: float
    ) -> None:
        counted = Counted(answer, self._permit) if answer.is_event_stream else answer
        await super().relay(status, headers, counted, idle, latest)

    async def finish(self, tail: bytes) -> None:
        self._permit.events += tail.count(EVENT)
        await super().finish(tail)

    def _told(self, headers: Sequence[Header]) -> list[Header]:
        """An engine's limits are the router's business."""
        return [*(h for h in headers if not h[0].startswith(LIMIT)), *self._lines]


class Counted:
    """A Relayed before another one: what passes is counted."""

    is_event_stream = True

    def __init__(self, answer: Relayed, permit: QuotaPermit) -> None:
        self._answer = answer
        self._permit = permit
        self.length = answer.length

    async def relay(self, sink: AnswerSink, idle: float, latest: float) -> None:
        await self._answer.relay(Counting(sink, self._permit), idle, latest)

    def pause(self) -> None:
        self._answer.pause()

    def resume(self) -> None:
        self._answer.resume()

    def fail(self, error: UpstreamError) -> None:
        self._answer.fail(error)


class Counting:
    """A Sink before another one."""

    def __init__(self, sink: AnswerSink, permit: QuotaPermit) -> None:
        self._sink = sink
        self._permit = permit

    def write(self, block: bytes, last: bool) -> None:
        self._permit.events += block.count(EVENT)
        self._sink.write(block, last)
