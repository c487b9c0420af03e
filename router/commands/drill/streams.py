"""The streams of a drill. Each is compared with an undisturbed greedy answer to its prompt.

The undisturbed answers carry log-probabilities where the engines report them, because engines that
batch requests differently may choose another token of nearly the same probability. From such a near
tie on, two right answers differ. The bound is that of the router's canary. Wrong KV may lead to
such a token as well, so what follows it is compared with an undisturbed answer that begins there.

Each request has a `cache_salt` of its own, so that engines compute every prompt and move its KV.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from math import isfinite
from typing import Any, NamedTuple
from uuid import uuid4

from router.commands.bench.chats import WORDS, Target
from router.commands.bench.load import Client, LoadExchange
from router.commands.console import CommandError
from router.commands.router_client import error_message
from router.http_client.sse import DONE, data_in
from router.openai.answers import choices_of, error_in, ids_in, parse_object
from router.proxy.canary import GREEDY_BOUND

PATH = "/v1/completions"
# The most that vLLM returns by default.
NUM_LOGPROBS = 20
MAX_PROBLEMS = 10
MAX_CONFIRMED_TIES = 50
MAX_PROBLEM_TEXT = 200
FAILURE_PAUSE_S = 0.2
BAD_REQUEST = (400, 422)


class Verdict(StrEnum):
    """The result of comparing a stream with the undisturbed answer."""

    RIGHT = "right"
    NEAR_TIE = "near tie"
    """Right up to a token that was nearly as likely as the other one."""
    WRONG = "WRONG"
    FAILED = "failed"
    """Right as far as it came, but no whole answer."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token of an undisturbed answer. `logprobs` are those of the likeliest tokens in its place,
    itself included, by text or as `token_id:N`."""

    name: str
    logprobs: Mapping[str, float]

    def gap_to(self, other: str) -> float:
        """Return how much less likely another token was, at least: one that is not listed was at
        most as likely as the last one."""
        most = self.logprobs.get(other, min(self.logprobs.values()))
        return self.logprobs[self.name] - most


@dataclass(frozen=True, slots=True)
class StreamedAnswer:
    """The content of a stream. `ids` are its token ids if they were asked for. `problem` says why
    it is no whole answer."""

    text: str
    ids: tuple[int, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Reference:
    """The undisturbed answer to a prompt, which is text or token ids."""

    prompt: str | list[int]
    text: str
    ids: tuple[int, ...] = ()
    tokens: Sequence[Token] = ()
    """Empty if the engine reports no log-probabilities."""

    def judge(self, answer: StreamedAnswer) -> Verdict:
        """Compare ids if this answer has some, else texts."""
        expected, got = self._compared(self), self._compared(answer)
        place = self._first_difference(answer)
        if place is None:
            if answer.problem and len(got) <= len(expected):
                return Verdict.FAILED
            return Verdict.RIGHT if len(got) == len(expected) else Verdict.WRONG
        if self.find_tie(answer) is None:
            return Verdict.WRONG
        return Verdict.FAILED if answer.problem else Verdict.NEAR_TIE

    def find_tie(self, answer: StreamedAnswer) -> NearTie | None:
        """Return where the answer has another token that was nearly as likely. None if it differs
        otherwise, or not at all."""
        place = self._first_difference(answer)
        if place is None or not self.tokens:
            return None
        if self.ids:
            number, other, end = place, f"token_id:{answer.ids[place]}", place + 1
        else:
            ends = list(accumulate(len(token.name) for token in self.tokens))
            number = sum(end <= place for end in ends)
            token, start = self.tokens[number], ends[number] - len(self.tokens[number].name)
            fit = {one for one in token.logprobs if one and answer.text.startswith(one, start)}
            other = max(fit - {token.name}, key=token.logprobs.__getitem__, default="")
            end = start + len(other)
        is_near = bool(other) and self.tokens[number].gap_to(other) <= GREEDY_BOUND
        return NearTie(self, answer, number, end) if is_near else None

    def _compared(self, one: Reference | StreamedAnswer) -> Sequence[object]:
        return one.ids if self.ids else one.text

    def _first_difference(self, answer: StreamedAnswer) -> int | None:
        pairs = enumerate(zip(self._compared(self), self._compared(answer), strict=False))
        return next((n for n, (one, other) in pairs if one != other), None)


class NearTie(NamedTuple):
    """An answer that is right up to its token with the index `number`. `end` is the index behind it
    in the ids, or in the text."""

    reference: Reference
    answer: StreamedAnswer
    number: int
    end: int

    def prompt(self) -> str | list[int]:
        """Return the prompt that ends with that token."""
        before = self.reference.prompt
        if isinstance(before, str):
            return before + self.answer.text[: self.end]
        return [*before, *self.answer.ids[: self.end]]

    def rest(self) -> StreamedAnswer:
        if self.reference.ids:
            return StreamedAnswer("", self.answer.ids[self.end :])
        return StreamedAnswer(self.answer.text[self.end :])


@dataclass(slots=True)
class Tally:
    """Counts the verdicts on a drill's streams. `longest_pause` is the longest time in seconds
    between two pieces of an answer."""

    counts: Counter[Verdict] = field(default_factory=Counter)
    problems: Counter[str] = field(default_factory=Counter)
    longest_pause: float = 0.0
    ties: list[NearTie] = field(default_factory=list)
    """The near ties that are not confirmed yet."""

    def note(self, verdict: Verdict, problem: str) -> None:
        self.counts[verdict] += 1
        if problem and (problem in self.problems or len(self.problems) < MAX_PROBLEMS):
            self.problems[problem] += 1

    @property
    def is_right(self) -> bool:
        return not self.counts[Verdict.WRONG] and not self.counts[Verdict.FAILED]


def prompts(number: int, words: int, seed: int) -> list[str]:
    chance = random.Random(seed)
    return [" ".join(chance.choices(WORDS, k=words)) for _ in range(number)]


@dataclass(frozen=True, slots=True)
class DrillClient:
    """Asks for the answers of a drill. One answer may take `timeout` seconds."""

    target: Target
    model: str
    tokens: int
    timeout: float
    with_ids: bool = False
    """The streams carry token ids, which are compared instead of texts."""

    async def learn(self, prompt: str | list[int], fewer: int = 0) -> Reference:
        """Return the undisturbed answer, of so many tokens fewer. Raises CommandError."""
        length = {"max_tokens": self.tokens - fewer}
        fields: dict[str, Any] = {"logprobs": NUM_LOGPROBS, **length}
        if self.with_ids:
            fields |= {"return_tokens_as_token_ids": True}
        client = Client(self.target.host, self.target.port)
        try:
            exchange = await self._send(client, prompt, fields)
            if exchange.status in BAD_REQUEST:  # engines may refuse log-probabilities
                exchange = await self._send(client, prompt, length)
        finally:
            client.close()
        content = parse_object(bytes(exchange.body)) or {}
        problem = exchange.problem or ("" if exchange.status == 200 else str(exchange.status))
        if problem:
            text = f"{problem} {error_message(content)}".strip()
            raise CommandError(f"no undisturbed answer from {self.target.url}: {text}")
        choice = next(iter(choices_of(content)), {})
        ids = ids_in(choice.get("prompt_token_ids"))
        prompt = ids if self.with_ids and ids else prompt
        found = Reference(prompt, str(choice.get("text") or ""), *self._tokens_in(choice))
        has_ids = bool(ids and found.ids)
        if not (has_ids if self.with_ids else found.text):
            what = "token ids" if self.with_ids else "text (--token-ids compares ids)"
            raise CommandError(f"the undisturbed answer of {self.target.url} has no {what}")
        return found

    async def compare(self, client: Client, reference: Reference, tally: Tally) -> Verdict:
        """Let one stream run, note what it was, and return that."""
        exchange = await self._send(client, reference.prompt, {"stream": True})
        tally.longest_pause = max(tally.longest_pause, exchange.longest_gap)
        answer = read_stream(exchange)
        verdict, problem = reference.judge(answer), answer.problem
        if verdict is Verdict.WRONG:
            problem = f"wrong: an answer ends with {answer.text[-60:]!r}"
        if verdict is Verdict.NEAR_TIE and (tie := reference.find_tie(answer)) is not None:
            tally.ties.append(tie)
        tally.note(verdict, " ".join(problem.split())[:MAX_PROBLEM_TEXT])
        return verdict

    async def confirm(self, tally: Tally) -> None:
        """Compare what follows on near ties with undisturbed answers. Raises CommandError."""
        for tie in tally.ties[:MAX_CONFIRMED_TIES]:
            left, fewer = tie, tie.number + 1
            while fewer < self.tokens:
                found = await self.learn(left.prompt(), fewer)
                verdict = found.judge(left.rest())
                following = found.find_tie(left.rest())
                if verdict is Verdict.NEAR_TIE and following is not None:
                    left, fewer = following, fewer + following.number + 1
                    continue
                if verdict is not Verdict.RIGHT:
                    tally.counts[Verdict.NEAR_TIE] -= 1
                    text = f"wrong after a near tie: an answer ends with {tie.answer.text[-60:]!r}"
                    tally.note(Verdict.WRONG, " ".join(text.split())[:MAX_PROBLEM_TEXT])
                break
        tally.ties.clear()

    async def run(
        self, references: Sequence[Reference], tally: Tally, ending: asyncio.Event
    ) -> None:
        """Stream the answers to all prompts, again and again. Each ends with a whole stream that
        began after `ending` was set."""

        async def repeat(reference: Reference) -> None:
            client = Client(self.target.host, self.target.port)
            try:
                is_last = False
                while not is_last:
                    is_last = ending.is_set()
                    if await self.compare(client, reference, tally) is Verdict.FAILED:
                        await asyncio.sleep(FAILURE_PAUSE_S)
            finally:
                client.close()

        async with asyncio.TaskGroup() as group:
            for reference in references:
                group.create_task(repeat(reference))

    async def _send(
        self, client: Client, prompt: object, fields: Mapping[str, Any]
    ) -> LoadExchange:
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": self.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": uuid4().hex,
            **({"return_token_ids": True} if self.with_ids else {}),
            **fields,
        }
        return await client.send(self.target.request(PATH, body), self.timeout)

    def _tokens_in(self, choice: Mapping[str, Any]) -> tuple[tuple[int, ...], Sequence[Token]]:
        """Return the ids of an undisturbed answer, if they are compared, and its tokens if their
        log-probabilities belong to what is compared."""
        ids = tuple(ids_in(choice.get("token_ids")) or ()) if self.with_ids else ()
        logged = choice.get("logprobs")
        names, tops = (
            found if isinstance(logged, dict) and isinstance(found := logged.get(key), list) else []
            for key in ("tokens", "top_logprobs")
        )
        tokens = []
        for name, top in zip(map(str, names), tops, strict=False):
            known = top.items() if isinstance(top, dict) else ()
            tokens.append(Token(name, {n: p for n, p in known if _is_number(p)}))
        read = [token.name for token in tokens if token.name in token.logprobs]
        expected = [f"token_id:{one}" for one in ids] if ids else choice.get("text")
        return ids, tokens if (read if ids else "".join(read)) == expected else ()


def read_stream(exchange: LoadExchange) -> StreamedAnswer:
    """Return what a stream of a completion has brought, which may be anything."""
    if exchange.status != 200:
        content = parse_object(bytes(exchange.body)) or {}
        status = exchange.status or exchange.problem
        return StreamedAnswer("", problem=f"{status} {error_message(content)}".strip())
    texts, ids, problem = [], [], exchange.problem or "a stream without [DONE]"
    for data in data_in(bytes(exchange.body)):
        if data.startswith(DONE):
            problem = exchange.problem
            break
        content = parse_object(data) or {}
        if error_in(content):
            problem = f"error event: {error_message(content)}"
            break
        for choice in choices_of(content):
            texts.append(str(choice.get("text") or ""))
            ids += ids_in(choice.get("token_ids")) or []
    return StreamedAnswer("".join(texts), tuple(ids), problem)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and isfinite(value)
