"""The load of `disagg-router bench`: its chats, and the figures of what came back.

The chats have several turns of random words, the same for a seed. Figures need bounded memory.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from router.commands.bench.load import TIMEOUT, Client, drive, request_bytes
from router.commands.connection_errors import no_answer
from router.commands.router_client import error_message
from router.http_client.errors import EventTooLargeError
from router.http_client.sse import DONE, MAX_EVENT_BYTES, SseReader
from router.openai.answers import choices_of, count_in, parse_object
from router.settings import Address
from router.telemetry.metric_types import nearest_rank

PATH = "/v1/chat/completions"
SHARES = (0.5, 0.9, 0.99)
MAX_TIMES = 100_000
MAX_PROBLEMS = 10
MAX_FAILURE_TEXT = 200
TEXT = """
river stone light paper window garden letter music bridge winter morning engine silver market forest
candle ocean number story mountain teacher kitchen travel signal yellow harbour question pocket
summer village answer shadow thunder copper meadow lantern
"""
WORDS = tuple(TEXT.split())
Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The chats to send. `words` is the length of a question, about as many tokens; `tokens` is the
    length of an answer. `fields` are further fields of each request."""

    model: str
    requests: int
    turns: int
    words: int
    tokens: int
    seed: int
    fields: Mapping[str, Any] = field(default_factory=dict)


class Chat(NamedTuple):
    name: str
    questions: Sequence[str]


def chats(plan: LoadPlan, run: str) -> Iterator[Chat]:
    """Yield chats until there are `requests` questions in all. `run` distinguishes this load."""
    left, number = plan.requests, 0
    while left > 0:
        chance = random.Random(f"{plan.seed}/{number}")
        turns = min(left, plan.turns)
        questions = [" ".join(chance.choices(WORDS, k=plan.words)) for _ in range(turns)]
        yield Chat(f"bench-{run}-{number}", questions)
        left, number = left - turns, number + 1


class Sample:
    """A uniform random sample of bounded size (reservoir sampling)."""

    def __init__(self, max_size: int = MAX_TIMES, seed: int = 1) -> None:
        self._max_size = max_size
        self._random = random.Random(seed)
        self.values: list[float] = []
        self.count = 0

    def add(self, value: float) -> None:
        self.count += 1
        if len(self.values) < self._max_size:
            self.values.append(value)
        elif (place := self._random.randrange(self.count)) < self._max_size:
            self.values[place] = value

    def quantiles(self) -> Mapping[str, float] | None:
        """Return quantiles by nearest rank, or None for an empty sample."""
        ordered = sorted(self.values)
        if not ordered:
            return None
        return {f"p{share * 100:g}": nearest_rank(ordered, share) for share in SHARES}


@dataclass(slots=True)
class Figures:
    """Times in seconds; `first` is TTFT, `gaps` lie between two pieces of text of one answer."""

    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    first: Sample = field(default_factory=Sample)
    gaps: Sample = field(default_factory=Sample)
    whole: Sample = field(default_factory=Sample)
    problems: Counter[str] = field(default_factory=Counter)

    def note_failure(self, problem: str) -> None:
        self.failed += 1
        if problem in self.problems or len(self.problems) < MAX_PROBLEMS:
            self.problems[problem] += 1

    @property
    def ended(self) -> int:
        return self.answered + self.failed

    def content(self, seconds: float) -> dict[str, Any]:
        """Return the JSON report of a load that took `seconds`."""
        return {
            "seconds": seconds,
            "answered": self.answered,
            "failed": self.failed,
            "problems": dict(self.problems),
            "requests_per_second": self.answered / seconds,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "completion_tokens_per_second": self.completion_tokens / seconds,
            "first_token_seconds": self.first.quantiles(),
            "inter_token_seconds": self.gaps.quantiles(),
            "whole_seconds": self.whole.quantiles(),
        }


class ChatError(Exception):
    """An answer that is none; the message is short."""


@dataclass(frozen=True, slots=True)
class Target:
    """A router, or an engine. `credential` is an Authorization header's value, or empty."""

    host: str
    port: int
    credential: str = ""

    @property
    def url(self) -> str:
        return f"http://{Address(self.host, self.port)}"

    def request(self, path: str, body: object) -> bytes:
        """Return a POST of this JSON value with the credential, as `Client.send` takes it."""
        headers = [("authorization", self.credential)] if self.credential else []
        host = str(Address(self.host, self.port))
        return request_bytes(path, orjson.dumps(body), headers, host)


@dataclass(frozen=True, slots=True)
class ChatLoad:
    """The load of `disagg-router bench`. One answer may take `timeout` seconds."""

    target: Target
    plan: LoadPlan
    timeout: float
    figures: Figures

    async def run(self, concurrency: int, run: str) -> None:
        """Hold all chats of the plan, `concurrency` at a time. `run` names this load's chats."""
        count = min(concurrency, self.plan.requests)
        clients = [Client(self.target.host, self.target.port) for _ in range(count)]
        try:
            await drive(clients, chats(self.plan, run), self._hold)
        finally:
            for client in clients:
                client.close()

    async def _hold(self, client: Client, chat: Chat) -> None:
        history: list[Message] = []
        for question in chat.questions:
            history.append({"role": "user", "content": question})
            answer = await self._ask(client, chat, history)
            if answer is None:
                break  # what follows would be another conversation
            history.append({"role": "assistant", "content": answer})

    async def _ask(self, client: Client, chat: Chat, history: list[Message]) -> str | None:
        """Return the answer's text; count what is none and return None."""
        body = {
            "model": self.plan.model,
            "messages": history,
            "conversation_id": chat.name,
            "max_tokens": self.plan.tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.plan.fields,
        }
        request = self.target.request(PATH, body)
        error = bytearray()
        reader = ChatStreamReader(time.monotonic(), self.figures)

        def on_body(piece: bytes) -> None:
            reader.write(piece)
            if len(error) < MAX_EVENT_BYTES:
                error.extend(piece)

        exchange = await client.send(request, self.timeout, on_body)
        try:
            if exchange.status not in (0, 200):
                message = error_message(parse_object(bytes(error)) or {})
                raise ChatError(f"{exchange.status} {message}".strip())
            if exchange.error is not None or exchange.problem == TIMEOUT:
                raise ChatError(no_answer(self.target.url, exchange.error, self.timeout))
            if exchange.problem:
                raise ChatError(f"{self.target.url}: {exchange.problem}")
            reader.end(exchange.ended)
        except ChatError as failure:
            self.figures.note_failure(" ".join(str(failure).split())[:MAX_FAILURE_TEXT])
            return None
        return "".join(reader.texts)


class ChatStreamReader:
    """Reads one streamed answer while it arrives. `asked` is when it was asked, in seconds.

    `first` and `last` are the moments of the first and the last piece of text.
    """

    def __init__(
        self, asked: float, figures: Figures, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.asked = asked
        self.texts: list[str] = []
        self._figures = figures
        self._clock = clock
        self._reader = SseReader()
        self.first: float | None = None
        self.last: float | None = None
        self.usage: dict[str, Any] = {}
        self.finish_reason = ""
        self._is_done = False
        self._problem = ""

    def write(self, block: bytes) -> None:
        moment = self._clock()
        try:
            events = self._reader.read(block)
        except EventTooLargeError as error:
            self._problem, self._reader = str(error), SseReader()
            return
        for event in events:
            if event.data is not None:
                self._read(event.data, moment)

    def end(self, moment: float) -> None:
        """Count the answer. Raises ChatError for one that is an error or not complete."""
        if self._problem or not self._is_done:
            raise ChatError(self._problem or "a stream without [DONE]")
        figures, usage = self._figures, self.usage
        figures.answered += 1
        figures.whole.add(moment - self.asked)
        figures.prompt_tokens += count_in(usage, "prompt_tokens") or 0
        figures.completion_tokens += count_in(usage, "completion_tokens") or 0
        figures.cached_tokens += count_in(usage.get("prompt_tokens_details"), "cached_tokens") or 0

    def _read(self, data: bytes, moment: float) -> None:
        if data.startswith(DONE):
            self._is_done = True
            return
        content = parse_object(data)
        if content is None or "error" in content:
            self._problem = (
                error_message(content) if content else "an event that is not a JSON object"
            )
            return
        usage = content.get("usage")
        if isinstance(usage, dict):
            self.usage = usage
        for choice in choices_of(content):
            self.finish_reason = str(choice.get("finish_reason") or self.finish_reason)
            delta = choice.get("delta")
            text = delta.get("content") if isinstance(delta, dict) else None
            if isinstance(text, str) and text:
                self.texts.append(text)
                if self.last is None:
                    self.first = moment
                    self._figures.first.add(moment - self.asked)
                else:
                    self._figures.gaps.add(moment - self.last)
                self.last = moment
