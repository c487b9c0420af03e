"""Answers with status 200 that are none.

An engine may say in an answer with status 200 that it has failed: an error object (vLLM's way of
reporting a failed generation in a stream), a finish reason that only a broken-off answer has, a
rejection that nobody asked for, or nothing at all. `failure_of` is the one place that tells these
from answers. Legs ask it before anything reaches the client, so that another engine can answer;
`StreamEnd` asks it of everything that follows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import orjson

from router.conversations.said import (
    Json,
    cached_tokens_of,
    choices_of,
    parsed,
    prompt_tokens_of,
)
from router.exact_json import dumps
from router.fleet.spec import DECODE, Role
from router.flows.bodies import message_in
from router.flows.errors import (
    JSON,
    EngineError,
    EngineUnavailableError,
    RefusedMidwayError,
    RejectedError,
    error_body,
    type_of_status,
)
from router.flows.journal import ends_inside_event, says_done
from router.flows.trial import is_rejection
from router.upstream.answer import HIGH_WATER, Answer, Tap
from router.upstream.errors import BrokenAnswerError
from router.upstream.sse import end_of_last_event

ABORT, ERROR = "abort", "error"
# Finish reasons after which there is no answer. What begins with letters is found sooner.
FINISH = re.compile(rb'finish_reason"(?<="finish_reason")\s*:\s*"([^"]+)"')
CODE = re.compile(r"[45][0-9]{2}")
BROKEN_OFF = frozenset((b"abort", b"error", b"cache_threshold"))
# Bytes of the longest finish reason that may have come without its end.
SEAM = 64
ERROR_KEY = b'"error"'
CHOICES = re.compile(rb'choices"(?<="choices")\s*:\s*\[\s*\{')
# Text of a stream's first event: then nothing else needs to be known of it.
TEXT = re.compile(rb'(?:"content"|"text"|"reasoning"|"reasoning_content")\s*:\s*"[^"]')
# Fields of a choice and of its delta that say nothing of the answer.
SILENT = frozenset(("index", "role", "delta", "finish_reason", "stop_reason"))


def failure_of(content: Json, role: Role) -> Exception | None:
    """Why a whole answer, or an event of a stream, means that its engine has failed; None if it
    does not.

    RejectedError: by the code in its error object (4xx) it is the request that was wrong.
    """
    error = _error_in(content)
    if error is not None:
        return _told(error, role)
    if is_rejection(content):
        return EngineError(f"the {role} engine rejected a request that it was to answer")
    for choice in choices_of(content):
        if choice.get("finish_reason") == ABORT:
            return EngineUnavailableError(
                f"the {role} engine is being stopped, and ended the request"
            )
        if choice.get("finish_reason") == ERROR:
            return EngineError(f"the {role} engine failed during the answer")
    return None


def _error_in(content: Json) -> object:
    """The error object of what is no answer: OpenAI's, or vLLM's before 0.10, or an event's."""
    error = content.get("error")
    if error and not any(map(_is_said, choices_of(content))):
        return error
    return content if ERROR in (content.get("object"), content.get("type")) else None


def _told(error: object, role: Role) -> Exception:
    said = error if isinstance(error, dict) else {"message": error}
    code, message = said.get("code"), said.get("message")
    if isinstance(code, str) and CODE.fullmatch(code):
        code = int(code)
    if type(code) is int and 400 <= code < 500:
        try:
            body = dumps({"error": said})
        except orjson.JSONEncodeError:  # it can be read, but not written: nested too deep
            body = error_body(code, type_of_status(code), str(message)[:1000])
        return RejectedError(code, JSON, body)
    text = f": {message[:1000]}" if isinstance(message, str) else ""
    return EngineError(f"the {role} engine answered with an error{text}")


# Before the client has anything.


async def first_word(
    answer: Answer, is_generation: bool = True, looks_ahead: bool = True
) -> Json | None:
    """The first event of a stream that says more than a role, left in place; None if it surely is
    text of the answer. `looks_ahead`: or else a failure among the events that came with it. Raises
    UpstreamError, BrokenAnswerError for a stream that ends before it."""

    def is_begun(block: bytes) -> bool:
        return _is_surely_text(block) or _first_word(block, is_generation, False) is not None

    held = await answer.until(is_begun)
    if _is_surely_text(held):
        return None
    found = _first_word(held, is_generation, looks_ahead)
    if found is None and len(held) <= HIGH_WATER:
        raise BrokenAnswerError("an event stream that says nothing")
    return found


def word_of(answer: Answer) -> Json | None:
    """The content of a generation's answer that is not streamed, left in place; None if it surely
    is an answer, or so long that it is no failure's. Raises BrokenAnswerError for what is no JSON
    object, or has no choices."""
    raw = answer.held()
    if not answer.is_complete:
        if not raw.lstrip().startswith(b"{"):
            raise BrokenAnswerError("an answer that is not JSON")
        return None
    return None if _is_surely_answer(raw) else _content_of(raw)


def prefilled_word(raw: bytes) -> Json | None:
    """The same of a prefiller's answer, of which nobody needs the choices."""
    return parsed(raw) if _may_fail(raw) else None


def passed_word(answer: Answer, may_be_empty: bool = False) -> Json | None:
    """The same of an endpoint that may answer with a list, a text or bytes. `may_be_empty`: it is
    asked what was said, which may be nothing, and may tell it as a text."""
    raw, kind = answer.held(), answer.header(b"content-type") or b""
    is_json = kind.startswith(b"application/json")
    is_odd = kind.startswith(b"text/html") or (is_json and raw.lstrip()[:1] not in (b"{", b"["))
    is_silence = may_be_empty and kind.startswith(b"text/plain")
    if is_odd or not (raw or is_silence):
        raise BrokenAnswerError("an answer that is empty, HTML, or not JSON as it says")
    return parsed(raw) if answer.is_complete and raw.find(ERROR_KEY) >= 0 else None


def _content_of(raw: bytes) -> Json:
    content = parsed(raw)
    if content is None:
        raise BrokenAnswerError("an answer that is not a JSON object")
    if not choices_of(content) and _error_in(content) is None:
        raise BrokenAnswerError("an answer without choices")
    return content


def _is_surely_text(block: bytes) -> bool:
    said = TEXT.search(block)
    return said is not None and end_of_last_event(block) > said.end() and not _may_fail(block)


def _is_surely_answer(raw: bytes) -> bool:
    """Without decoding it."""
    is_object = raw.startswith(b"{") and raw.endswith(b"}")
    return is_object and CHOICES.search(raw) is not None and not _may_fail(raw)


def _may_fail(said: bytes) -> bool:
    return said.find(ERROR_KEY) >= 0 or is_broken_off(said)


def is_broken_off(said: bytes) -> bool:
    """Whether a finish reason in JSON says so."""
    return not BROKEN_OFF.isdisjoint(FINISH.findall(said))


def _first_word(block: bytes, is_generation: bool, looks_ahead: bool) -> Json | None:
    first: Json | None = None
    for _, event in _events(block):
        if first is None and (not is_generation or _says_something(event)):
            first = event
            if not looks_ahead:
                break
        if first is not None and failure_of(event, DECODE) is not None:
            return event
    return first


def _says_something(event: Json) -> bool:
    """Whether an event is part of an answer, or instead of one: anything but a role alone."""
    return _error_in(event) is not None or any(map(_is_said, choices_of(event)))


def _is_said(choice: Json) -> bool:
    delta = choice.get("delta")
    said = {**choice, **delta} if isinstance(delta, dict) else choice
    return bool(choice.get("finish_reason")) or any(
        value for name, value in said.items() if name not in SILENT
    )


def _events(block: bytes) -> Iterator[tuple[int, Json]]:
    """The whole events that are JSON objects, each with the place where it begins."""
    end = end_of_last_event(block)
    if block.find(b"\n", 0, end) < 0:
        block = block.replace(b"\r", b"\n")  # as long as it was
    start = at = 0
    while at < end:
        line_end = block.find(b"\n", at, end)
        line = block[at:line_end].rstrip(b"\r")
        at = line_end + 1
        if not line:
            start = at
        elif line.startswith(b"data:") and (content := parsed(line[5:])) is not None:
            yield start, content


async def cached_share(answer: Answer) -> float | None:
    """How much of the prompt came from the decoder's cache, where its usage tells."""
    if answer.is_event_stream:
        return None
    content = parsed(await answer.until(lambda _: False))
    if content is None:
        return None
    cached, total = cached_tokens_of(content), prompt_tokens_of(content)
    return cached / total if cached is not None and total else None


# While it passes to the client.


def failure_midway(block: bytes, role: Role) -> tuple[int, Exception | None]:
    """Where in whole events of a stream of which the client has some a failure begins, and what to
    raise; the end of them and None where they tell of none."""
    for start, event in _events(block):
        failure = failure_of(event, role)
        if isinstance(failure, RejectedError):
            text = f"the {role} engine ended the answer{message_in(failure.body)}"
            return start, RefusedMidwayError(text)
        if failure is not None:
            return start, failure
    return len(block), None


class Long:
    """A watch for an answer that is no stream, and too long to be judged before it passes: it fails
    where it says that its engine has broken it off."""

    __slots__ = ("_answer", "_seam")

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._seam = b""

    def passing(self, block: bytes) -> bytes:
        said = self._seam + block
        if is_broken_off(said):
            self._answer.error = BrokenAnswerError("an answer that its engine has broken off")
        self._seam = said[-SEAM:]
        return block


class StreamEnd:
    """A Tap for a stream that no other engine can go on with.

    Events pass until one says that the engine has failed; from there on nothing does. `failure` is
    then what to raise once the stream is over, as it is for a stream of a generation that ends
    without a finish reason and without [DONE], or inside an event. `is_several`: of the answers in
    it one may end long before the others, so only [DONE] is its end. `last` is what the stream's
    reader says at its end.
    """

    __slots__ = ("_inner", "_is_done", "_is_ended", "_is_several", "_role", "failure", "last")

    def __init__(
        self, role: Role, inner: Tap | None, is_generation: bool, is_several: bool = False
    ) -> None:
        self._role = role
        self._inner = inner
        self._is_several = is_several
        self._is_done = False
        self._is_ended = not is_generation
        self.failure: Exception | None = None
        self.last = b""

    def passing(self, block: bytes, last: bool) -> bytes:
        if self.failure is not None:
            return b""
        finishes = FINISH.findall(block)
        if block.find(ERROR_KEY) >= 0 or not BROKEN_OFF.isdisjoint(finishes):
            start, failure = failure_midway(block, self._role)
            # Here and in no method of its own: compiled, this one would go on to hold it for None.
            block, self.failure = block[:start], failure
        self._is_done = self._is_done or says_done(block)
        if not self._is_ended:
            self._is_ended = self._is_done or (bool(finishes) and not self._is_several)
        if last and self.failure is None and not self._is_whole(block):
            self.failure = BrokenAnswerError("an event stream that ended before its answer")
            block = block[: end_of_last_event(block)]
        is_last = last and self.failure is None
        if self._inner is not None:
            return self._inner.passing(block, is_last)
        if is_last:
            self.last, block = block, b""
        return block

    def _is_whole(self, ending: bytes) -> bool:
        return self._is_done or (self._is_ended and not ends_inside_event(ending))
