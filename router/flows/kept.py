"""A turn's answer on its way to the client, and what it leaves for the next turn.

The decoder's kv_transfer_params say where the next turn's KV is. They are the router's: it asked
for them, so the client does not see them. They are kept before the client sees the answer's end,
so that its next turn finds them, whichever router it asks. What nobody will find again is given
back to its decoder.

A stream is not decoded as it passes, only searched for the params. Once those are there, what was
said is read from a copy, all at once.
"""

from __future__ import annotations

import re

import orjson

from router.conversations.conversations import Turn
from router.conversations.said import Json, Said, events_in, parsed, said_by, said_in
from router.fleet.engine import Engine
from router.flows import headers, legs, reemit
from router.flows.gateway import Gateway
from router.flows.release import give_up_turn
from router.flows.request import Request
from router.flows.steps import note_done, note_first_byte
from router.upstream.answer import Answer, Sink

NEEDLE = b'"kv_transfer_params"'
EVENT_END = re.compile(rb"(\r\n\r\n|\n\n|\r\r)")
COPY_LIMIT = 4 * 1024 * 1024
EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]


class Keeper:
    """Delivers one turn's answer. `exact`: the client streams, the decoder does not."""

    def __init__(self, turn: Turn, prompt_tokens: int | None, exact: bool) -> None:
        self._turn = turn
        self._prompt_tokens = prompt_tokens
        self._exact = exact

    async def deliver(
        self, request: Request, gateway: Gateway, engine: Engine, answer: Answer
    ) -> None:
        note_first_byte(request, answer)
        if answer.is_event_stream:
            await self._relay(request, gateway, engine, answer)
        else:
            await self._respond(request, gateway, engine, answer)
        note_done(request)

    async def _respond(
        self, request: Request, gateway: Gateway, engine: Engine, answer: Answer
    ) -> None:
        raw = await answer.read(gateway.limits.max_answer_size)
        content, given = parsed(raw), answer.headers
        if content is not None:
            params = content.pop(legs.KV_PARAMS, None)
            raw = raw if params is None else orjson.dumps(content)
            await self.keep(request, gateway, engine, params, said_in(content))
            if self._exact and reemit.is_answer(content):
                raw, given = reemit.events(content, request.body), EVENT_STREAM
        passed = headers.to_client(given, request.record.request_id)
        await request.exchange.respond(answer.status, passed, raw)

    async def _relay(
        self, request: Request, gateway: Gateway, engine: Engine, answer: Answer
    ) -> None:
        request.event_stream = True
        await request.exchange.relay(
            answer.status,
            headers.to_client(answer.headers, request.record.request_id),
            Tapped(answer, self, request, gateway, engine),
            gateway.limits.stream_idle_timeout,
            request.latest,
        )

    async def keep(
        self,
        request: Request,
        gateway: Gateway,
        engine: Engine,
        params: object,
        said: Said | None,
    ) -> None:
        """Leaves `params` for the next turn, if they are some."""
        conversations, kept = gateway.conversations, "not_offered"
        if conversations is not None and isinstance(params, dict) and _tells_where(params):
            engine.learned.note_kept(params)
            tokens = self._prompt_tokens
            if tokens is None and said is not None:
                tokens = said.prompt_tokens
            done, lost = await conversations.keep(self._turn, engine.name, params, said, tokens)
            kept = "kept" if done else "not_kept"
            for entry in lost:
                give_up_turn(request, gateway, entry)
        gateway.metrics.conversation_kept.add((kept,))


def _tells_where(params: Json) -> bool:
    """A decoder that rejects has params too: why it did."""
    return any(name.startswith("remote_") for name in params)


class Tapped:
    """A decoder's stream, relayed without its params, ended once these are kept."""

    def __init__(
        self, answer: Answer, keeper: Keeper, request: Request, gateway: Gateway, engine: Engine
    ) -> None:
        self._answer = answer
        self._keeper = keeper
        self._request = request
        self._gateway = gateway
        self._engine = engine

    @property
    def is_event_stream(self) -> bool:
        return True

    @property
    def length(self) -> int | None:
        return None

    def pause(self) -> None:
        self._answer.pause()

    def resume(self) -> None:
        self._answer.resume()

    async def relay(self, sink: Sink, idle: float, latest: float) -> None:
        tail = Tail(sink)
        try:
            await self._answer.relay(tail, idle, latest)
        except BaseException:
            if tail.params is not None:  # said to its end, which nobody waits for
                self._gateway.spawn(self._keep(tail))
            raise
        self._note(tail.params is not None)
        await self._keep(tail)
        sink.write(tail.last, True)

    async def _keep(self, tail: Tail) -> None:
        said = None if tail.params is None else tail.said()
        await self._keeper.keep(self._request, self._gateway, self._engine, tail.params, said)

    def _note(self, has_params: bool) -> None:
        learned = self._engine.learned
        learned.note_stream(has_params)
        if learned.streams_params is False:
            self._gateway.throttle.warn(
                "a decoder does not stream kv_transfer_params: turns are reused only with "
                "conversation_stream exact",
                self._engine.name,
            )


class Tail:
    """A Sink that takes the params out of what passes, and holds the end back.

    Clients stop reading at [DONE], before the body ends. So from the params on, which come with the
    end of the answer, each block waits for the one after it.
    """

    def __init__(self, sink: Sink) -> None:
        self.params: Json | None = None
        self.last = b""
        self._sink = sink
        self._copy: list[bytes] = []
        self._size = 0

    def write(self, block: bytes, last: bool) -> None:
        if block.find(NEEDLE) >= 0:
            block = self._without_params(block)
        self._size += len(block)
        if self._size <= COPY_LIMIT:
            self._copy.append(block)
        if last:
            self.last += block
            return
        if self.params is not None:
            block, self.last = self.last, block
        if block:
            self._sink.write(block, False)

    def said(self) -> Said | None:
        if self._size > COPY_LIMIT:
            return None
        return said_by(events_in(b"".join(self._copy)))

    def _without_params(self, block: bytes) -> bytes:
        pieces = EVENT_END.split(block)
        ends = [*pieces[1::2], b""]
        return b"".join(map(self._event, pieces[::2], ends))

    def _event(self, event: bytes, end: bytes) -> bytes:
        if NEEDLE not in event or not event.startswith(b"data:"):
            return event + end
        content = parsed(event[5:])
        if content is None or legs.KV_PARAMS not in content:
            return event + end
        params = content.pop(legs.KV_PARAMS)
        if isinstance(params, dict) and params:
            self.params = params
        if content.get("choices") == [] and content.get("usage") is None:
            return b""  # an event for the params alone, which no client expects
        return b"data: " + orjson.dumps(content) + end
