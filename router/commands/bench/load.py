"""Asks, and measures what comes: chats one after the other, several at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from router.commands.bench.chats import Chat, Message, Wish, chats
from router.commands.bench.figures import Figures
from router.http_client.deadlines import Deadlines, now
from router.http_client.engine_answer import EngineAnswer
from router.http_client.errors import UpstreamError
from router.http_client.pool import EnginePool, PoolLimits
from router.http_client.sse import MAX_EVENT_BYTES
from router.openai.answers import parse_object

PATH = "/v1/chat/completions"
DONE = b"[DONE]"
LARGEST_ERROR = 64 * 1024
LIMITS = PoolLimits(
    connect_timeout=10.0, idle_connections=1024, idle_age=60.0, header_limit=64 * 1024
)


class ChatError(Exception):
    """An answer that is none; the message is short."""


@dataclass(frozen=True, slots=True)
class Target:
    """A router, or an engine. `credential` is an Authorization header's value, or empty."""

    host: str
    port: int
    credential: str = ""


class Load:
    """`patience` is how long one answer may take, in seconds."""

    def __init__(self, target: Target, wish: Wish, patience: float, figures: Figures) -> None:
        self._target = target
        self._wish = wish
        self._patience = patience
        self._figures = figures
        self._pool = EnginePool(target.host, target.port, LIMITS, Deadlines())

    async def run(self, concurrency: int, run: str) -> None:
        waiting = chats(self._wish, run)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, self._wish.requests)):
                    group.create_task(self._chats(waiting))
        finally:
            self._pool.close()

    async def _chats(self, waiting: Iterator[Chat]) -> None:
        for chat in waiting:
            history: list[Message] = []
            for question in chat.questions:
                history.append({"role": "user", "content": question})
                said = await self._turn(chat, history)
                if said is None:
                    break  # what follows would be another conversation
                history.append({"role": "assistant", "content": said})

    async def _turn(self, chat: Chat, history: list[Message]) -> str | None:
        """None where there is no answer, which is counted."""
        message = self._message(orjson.dumps(chat.body(history, self._wish)))
        reading = Reading(now(), self._figures)
        try:
            await self._ask(message, reading)
            reading.end(now())
        except (UpstreamError, ChatError) as error:
            self._figures.note_failure(" ".join(str(error).split())[:200])
            return None
        return "".join(reading.said)

    async def _ask(self, message: bytes, reading: Reading) -> None:
        """Raises UpstreamError, ChatError."""
        latest = reading.asked + self._patience
        answer = await self._pool.ask(message, latest)
        try:
            if answer.status != 200 or not answer.is_event_stream:
                raise ChatError(await _refusal(answer))
            await answer.relay(reading, self._patience, latest)
        finally:
            answer.close()

    def _message(self, body: bytes) -> bytes:
        host = self._target.host
        lines = [
            f"POST {PATH} HTTP/1.1",
            f"host: {f'[{host}]' if ':' in host else host}:{self._target.port}",
            "content-type: application/json",
            f"content-length: {len(body)}",
        ]
        if self._target.credential:
            lines.append(f"authorization: {self._target.credential}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


class Reading:
    """One streamed answer while it arrives: a Sink. What is no event of a chat ends it badly."""

    def __init__(self, asked: float, figures: Figures, clock: Callable[[], float] = now) -> None:
        self.asked = asked
        self.said: list[str] = []
        self._figures = figures
        self._clock = clock
        self._rest = b""
        self._last: float | None = None
        self._usage: dict[str, Any] = {}
        self._is_done = False
        self._problem = ""

    def write(self, block: bytes, last: bool) -> None:
        moment = self._clock()
        *events, self._rest = (self._rest + block).replace(b"\r\n", b"\n").split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            self._problem, self._rest = "an event without end", b""
        for event in events:
            self._event(event, moment)

    def end(self, moment: float) -> None:
        """Raises ChatError for an answer that was none, or not all of one."""
        if self._problem or not self._is_done:
            raise ChatError(self._problem or "a stream without [DONE]")
        figures, usage = self._figures, self._usage
        figures.answered += 1
        figures.whole.add(moment - self.asked)
        figures.prompt_tokens += _number(usage, "prompt_tokens")
        figures.completion_tokens += _number(usage, "completion_tokens")
        figures.cached_tokens += _number(usage.get("prompt_tokens_details"), "cached_tokens")

    def _event(self, event: bytes, moment: float) -> None:
        if not event.startswith(b"data:"):
            return  # a comment
        data = event[5:].strip()
        if data == DONE:
            self._is_done = True
            return
        content = parse_object(data)
        if content is None:
            self._problem = "an event that is no JSON object"
        elif "error" in content:
            self._problem = _told(content)
        else:
            self._chunk(content, moment)

    def _chunk(self, content: dict[str, Any], moment: float) -> None:
        usage = content.get("usage")
        if isinstance(usage, dict):
            self._usage = usage
        choices = content.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            delta = choice.get("delta") if isinstance(choice, dict) else None
            text = delta.get("content") if isinstance(delta, dict) else None
            if isinstance(text, str) and text:
                self.said.append(text)
                self._note_text(moment)

    def _note_text(self, moment: float) -> None:
        if self._last is None:
            self._figures.first.add(moment - self.asked)
        else:
            self._figures.gaps.add(moment - self._last)
        self._last = moment


async def _refusal(answer: EngineAnswer) -> str:
    content = parse_object(await answer.read(LARGEST_ERROR))
    told = "" if content is None else _told(content)
    return f"{answer.status} {told}".strip()


def _told(content: dict[str, Any]) -> str:
    error = content.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return str(message)[:200]


def _number(content: object, name: str) -> int:
    value = content.get(name) if isinstance(content, dict) else None
    return value if type(value) is int and value >= 0 else 0
