"""Find out whether an answer with HTTP status 200 is one.

An engine may return status 200 with an error object (vLLM reports a failed generation in a stream
like this), with the finish reason of an aborted answer, with a rejection that the router did not
request, or with no content. `failure_of` decides whether JSON content is such a failure. A decode
engine may also return an answer for lack of KV blocks, as it was asked to: `preemption_in`.

Legs read the beginning of an answer before the client has received anything, so that the router can
retry on another engine. A `StreamValidator` checks the beginning of a stream, and then the rest
while it is relayed.

Most answers are what they should be, and are not decoded to find that out: the functions first look
for the bytes without which there is no failure.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
import orjson

from router.common.exact_json import dumps
from router.fleet.engine import DECODE, EngineRole
from router.http_client.engine_answer import HIGH_WATER, AnswerTap, EngineAnswer
from router.http_client.errors import BrokenAnswerError
from router.http_client.sse import DONE_AT_END, DONE_EVENT, EVENT_ENDS, end_of_last_event, says_done
from router.openai.answers import (
    ABORT_VALUE,
    BROKEN_OFF,
    ERROR_KEY,
    FINISH_KEY,
    FINISH_REASON,
    REJECTION,
    REJECTION_VALUE,
    Json,
    cached_tokens_of,
    choices_of,
    ends_inside_event,
    error_in,
    has_output,
    is_rejection,
    json_events,
    parse_object,
    prompt_tokens_of,
    read_generated_tokens,
)
from router.openai.errors import (
    JSON,
    EngineError,
    EngineRejectedError,
    EngineUnavailableError,
    PreemptedError,
    RejectedMidStreamError,
    error_body,
    type_of_status,
)
from router.proxy.internal_fields import events_without_fields, may_have_fields, quotes_params
from router.proxy.kv_params import PREFIX_HASHES_KEY, KvParams
from router.proxy.messages import error_text

ABORT, ERROR, PREEMPTED = "abort", "error", "preempted"
ABSENT = msgspec.Raw(b"null")
EMPTY = (b"null", b"[]")
# Finish and stop reason of an answer that was returned for lack of KV blocks; and vLLM's of a chat
# that had called a tool by then.
RETURNED = (REJECTION, PREEMPTED)
RETURNED_AFTER_TOOL_CALL = ("tool_calls", PREEMPTED)
PREEMPTED_VALUE = b'"preempted"'
# Finish reasons of an answer that is complete, and that its engine did not return.
USUAL_REASONS = frozenset(("stop", "length"))
CODE = re.compile(r"[45][0-9]{2}")
# Ends no block.
NO_EVENT = b"\0"
# Bytes of the longest finish reason that may be cut.
SEAM_BYTES = 64
CHOICES_KEY = b'"choices"'
# Text of a stream's first event. It then is no failure.
CONTENT_KEY = b'"content"'
TEXT = re.compile(rb'(?:"content"|"text"|"reasoning"|"reasoning_content")\s*:\s*"[^"]')
MAX_LAST_EVENTS = 4
# Up to this size, a block counts as few events.
SHORT_BLOCK_BYTES = 2048


def failure_of(content: Json, role: EngineRole) -> Exception | None:
    """Return the failure that a whole answer or an event of a stream reports; None if it reports
    none.

    The failure is an EngineRejectedError if the error object has a 4xx code: then the request is
    at fault.
    """
    error = error_in(content)
    if error is not None:
        return _error_of(error, role)
    if is_rejection(content):
        return EngineError(
            f"the {role.engine} applied a cache threshold that the router did not set"
        )
    for choice in choices_of(content):
        if choice.get("finish_reason") == ABORT:
            return EngineUnavailableError(
                f"the {role.engine} is being stopped, and ended the request"
            )
        if choice.get("finish_reason") == ERROR:
            return EngineError(f"the {role.engine} failed during the answer")
    return None


def _error_of(error: object, role: EngineRole) -> Exception:
    fields = error if isinstance(error, dict) else {"message": error}
    code, message = fields.get("code"), fields.get("message")
    if isinstance(code, str) and CODE.fullmatch(code):
        code = int(code)
    if type(code) is int and 400 <= code < 500:
        try:
            body = dumps({"error": fields})
        except orjson.JSONEncodeError:  # it can be read, but not written: nested too deep
            body = error_body(code, type_of_status(code), str(message)[:1000])
        return EngineRejectedError(code, JSON, body)
    text = ""
    if isinstance(message, str) and not quotes_params(message):
        text = f": {message[:1000]}"
    return EngineError(f"the {role.engine} answered with an error{text}")


class _PrefilledChoice(msgspec.Struct):
    finish_reason: str | None = None


class _PrefillFields(msgspec.Struct):
    choices: msgspec.Raw = ABSENT
    kv_transfer_params: msgspec.Raw = ABSENT
    usage: msgspec.Raw = ABSENT
    error: Any = None
    object: Any = None
    type: Any = None


_decode_answer = msgspec.json.Decoder(_PrefillFields).decode
_decode_choices = msgspec.json.Decoder(list[_PrefilledChoice]).decode


class PrefillAnswer:
    """The answer of a prefill engine.

    `params` is None if the engine sent none; `usage` is JSON as the engine wrote it. `raw` is the
    whole answer. `is_whole_answer` is True if the one token of the engine ends the answer.
    `may_fail` is False if the answer certainly reports no failure.
    """

    __slots__ = (
        "_choices", "is_whole_answer", "may_fail", "mentions_prefix_hashes", "params", "raw",
        "usage",
    )  # fmt: skip

    def __init__(self, answer: bytes) -> None:
        """Raises BrokenAnswerError if `answer` is not a JSON object, or has neither params nor
        choices."""
        try:
            try:
                content = _decode_answer(answer)
            except (msgspec.DecodeError, UnicodeDecodeError):
                if (lenient := parse_object(answer)) is None:
                    raise
                answer = dumps(lenient)
                content = _decode_answer(answer)
            given = bytes(content.kv_transfer_params)
            given.decode()  # msgspec does not check the encoding of a raw value
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BrokenAnswerError(f"not a JSON object: {error}") from error
        # The start shows whether they are empty; they may be large.
        is_some = given[:1] == b"{" and given[1:64].strip(b" \t\r\n") not in (b"", b"}")
        self.params = KvParams(given) if is_some else None
        choices = bytes(content.choices)
        if self.params is None and choices.translate(None, b" \t\r\n") in EMPTY:
            raise BrokenAnswerError("an answer without choices")
        self.usage, self._choices = bytes(content.usage), choices
        is_error = content.error or "error" in (content.object, content.type)
        self.may_fail = bool(
            is_error
            or choices.find(ERROR_KEY) >= 0  # `in` costs three times as much for bytes
            or choices.find(ABORT_VALUE) >= 0
            or choices.find(REJECTION_VALUE) >= 0
        )
        self.mentions_prefix_hashes = given.rfind(PREFIX_HASHES_KEY) >= 0
        self.raw = answer
        self.is_whole_answer = False

    @property
    def model(self) -> object:
        """The name of the model that has answered."""
        return (parse_object(self.raw) or {}).get("model")

    @property
    def finish_reason(self) -> str | None:
        """The finish reason of the only choice, None if there is no such choice."""
        try:
            (choice,) = _decode_choices(self._choices)
        except (msgspec.DecodeError, ValueError):  # not exactly one choice
            return None
        return choice.finish_reason

    def prepare_hand_over(self) -> str:
        """Prepare the hand-over of the token that the engine has sampled.

        The token becomes the first one of the answer, or the whole answer (`is_whole_answer`).
        Return the metric label of the outcome.
        """
        params, finish = self.params, self.finish_reason
        if params is None or not params.has_generated_tokens:
            return "no_token"
        if finish not in ("stop", "length") or not params.has_one_token:
            self.params = params.without_generated_tokens()
            return "no_token"
        self.is_whole_answer = finish == "stop"
        self.params = KvParams(params.raw, continues_tokens=True)
        return "ended" if self.is_whole_answer else "continued"


# Before the client has anything. What is read stays in the answer's buffer.


def generation_content(answer: EngineAnswer, raw: bytes) -> Json | None:
    """Return the content of a non-streamed generation answer that has sent `raw` so far. None if
    the content certainly is an answer (then `answer.checked` is set), or is too long for a failure.
    Raises BrokenAnswerError if it is not a JSON object or has no choices."""
    if not answer.is_complete:
        if not raw.lstrip().startswith(b"{"):
            raise BrokenAnswerError("an answer that is not JSON")
        return None
    if _is_surely_answer(raw):
        answer.checked = raw
        return None
    content = parse_object(raw)
    if content is None:
        raise BrokenAnswerError("an answer that is not a JSON object")
    if not choices_of(content) and error_in(content) is None:
        raise BrokenAnswerError("an answer without choices")
    return content


class _CheckedChoice(msgspec.Struct, gc=False):
    finish_reason: str | None = None
    stop_reason: Any = None


class _CheckedFields(msgspec.Struct, gc=False):
    choices: list[_CheckedChoice]
    error: Any = None
    object: Any = None
    type: Any = None


# Reads only these fields, and checks that the rest is JSON.
_decode_checked = msgspec.json.Decoder(_CheckedFields).decode


def _is_surely_answer(raw: bytes) -> bool:
    """Return True for JSON whose finish reasons are usual ones, without an error."""
    try:
        content = _decode_checked(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    if not content.choices or content.error or ERROR in (content.object, content.type):
        return False
    for choice in content.choices:
        if choice.finish_reason not in USUAL_REASONS or choice.stop_reason == REJECTION:
            return False
    return True


def passthrough_content(answer: EngineAnswer, may_be_empty: bool = False) -> Json | None:
    """Return the content of an answer of another endpoint if it may report a failure, else None.
    Such an answer may be a list, text or bytes. `may_be_empty`: a transcript of silence, which may
    be an empty text. Raises BrokenAnswerError."""
    raw, kind = answer.peek(), answer.header(b"content-type") or b""
    is_json = kind.startswith(b"application/json")
    is_odd = kind.startswith(b"text/html") or (is_json and raw.lstrip()[:1] not in (b"{", b"["))
    is_silence = may_be_empty and kind.startswith(b"text/plain")
    if is_odd or not (raw or is_silence):
        raise BrokenAnswerError(
            "an answer that is empty, HTML, or not the JSON that its Content-Type announces"
        )
    return parse_object(raw) if answer.is_complete and raw.find(ERROR_KEY) >= 0 else None


def is_broken_off(answer: bytes) -> bool:
    """Return True if a finish reason in this JSON text reports an answer that was not completed."""
    return not BROKEN_OFF.isdisjoint(FINISH_REASON.findall(answer))


def _find_output(block: bytes, is_generation: bool, looks_ahead: bool = False) -> Json | None:
    first: Json | None = None
    for _, content in json_events(block):
        if first is None and (
            not is_generation
            or error_in(content) is not None
            or any(map(has_output, choices_of(content)))
        ):
            first = content
            if not looks_ahead:
                break
        if first is not None and failure_of(content, DECODE) is not None:
            return content
    return first


def _last_events(block: bytes) -> bytes:
    """Return the end of a block of a stream with one choice where a failure would stand.

    A failure ends such a stream: a usage, [DONE] and a comment may follow, and no more.
    """
    at = len(block)
    for _ in range(MAX_LAST_EVENTS + 1):  # the first one ends the block
        at = block.rfind(b"\n\n", 0, at)
        if at < 0:
            return block
    return block[at:]


class _Choice(msgspec.Struct, gc=False):
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class _ReturnedAnswer(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


_decode_returned = msgspec.json.Decoder(_ReturnedAnswer).decode


def preemption_in(answer: EngineAnswer, content: Json | None) -> PreemptedError | None:
    """Return the PreemptedError for an answer that its engine returned for lack of KV blocks, else
    None. `content` is a stream's first event with output; the resume buffer has the tokens before
    it. A non-streamed answer reports its tokens, for another decode engine to send all of them."""
    if answer.is_event_stream:
        reasons = [] if content is None else [*map(_reasons_of, choices_of(content))]
        return PreemptedError() if RETURNED in reasons else None
    raw = answer.peek() if answer.is_complete else b""
    if raw.find(PREEMPTED_VALUE) < 0:
        return None
    try:
        whole = _decode_returned(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    finishes = [(choice.finish_reason, choice.stop_reason) for choice in whole.choices]
    begun = read_generated_tokens(bytes(whole.kv_transfer_params))
    if RETURNED in finishes or (begun is not None and RETURNED_AFTER_TOOL_CALL in finishes):
        return PreemptedError(begun)
    return None


def _reasons_of(choice: Json) -> tuple[object, object]:
    return choice.get("finish_reason"), choice.get("stop_reason")


async def cached_share(answer: EngineAnswer) -> float | None:
    """Return the share of the prompt that the decode engine had cached, if its usage has it."""
    if answer.is_event_stream:
        return None
    content = parse_object(await answer.peek_until(lambda _: False))
    if content is None:
        return None
    cached, total = cached_tokens_of(content), prompt_tokens_of(content)
    return cached / total if cached is not None and total else None


# While it passes to the client.


def failure_midway(
    block: bytes, role: EngineRole, at_end: bool = False
) -> tuple[int, Exception | None]:
    """Find a failure in the next events of a stream that the client has partly received. `at_end`:
    no event follows. Returns the offset of the failure and the error to raise, or the length of the
    block and None."""
    for event, content in json_events(block, at_end):
        failure = failure_of(content, role)
        if isinstance(failure, EngineRejectedError):
            text = f"the {role.engine} ended the answer{error_text(failure.body)}"
            return event.start, RejectedMidStreamError(text, failure.status)
        if failure is not None:
            return event.start, failure
    return len(block), None


class LongAnswerCheck:
    """A watch for a non-streamed answer that is too long to be checked before it is relayed. It
    fails the answer if a finish reason reports that the engine aborted it."""

    __slots__ = ("_answer", "_seam")

    def __init__(self, answer: EngineAnswer) -> None:
        self._answer = answer
        self._seam = b""

    def passing(self, block: bytes) -> bytes:
        # Blocks are large, and not copied.
        if is_broken_off(self._seam + block[:SEAM_BYTES]) or is_broken_off(block):
            self._answer.error = BrokenAnswerError("an answer that the engine aborted")
        self._seam = (self._seam + block[-SEAM_BYTES:])[-SEAM_BYTES:]
        return block


class StreamValidator:
    """An AnswerTap for a stream that cannot be resumed on another engine.

    It passes events until one reports a failure, and drops everything after that. `failure` is the
    error to raise when the stream is over. A generation's stream also fails if it ends inside an
    event, or without a finish reason and without [DONE]. `is_several`: the stream has several
    choices, which may end at different times, so only [DONE] ends it. `inner` is the tap behind
    this one, which the relay may set before the first block passes. With `hides_fields`, internal
    fields do not pass; a turn's tap takes them itself. `last` is the final block,
    which the owner of the stream sends.

    A leg first asks whether it `accepts` what the engine has sent so far, and waits for the
    `first_output` if it does not. Nothing has passed then, and the answer still holds all of it.

    Most blocks are one event of one line that ends as the event before it did, from
    `"finish_reason":null` on. Such a block neither ends the stream nor has the finish reason of a
    failure, so the validator only searches it for an error, and for internal fields.
    """

    __slots__ = ("_checked", "_is_done", "_is_ended", "_is_generation", "_is_several", "_role",
                 "_usual_end", "failure", "hides_fields", "inner", "last")  # fmt: skip

    def __init__(
        self,
        role: EngineRole,
        inner: AnswerTap | None,
        is_generation: bool,
        is_several: bool = False,
    ) -> None:
        self.inner = inner
        self._role = role
        self._is_generation = is_generation
        self._is_several = is_several
        self._checked = b""
        self._is_done = False
        self._is_ended = not is_generation
        self._usual_end = NO_EVENT
        self.hides_fields = False
        self.failure: Exception | None = None
        self.last = b""

    def accepts(self, block: bytes) -> bool:
        """Return True if a stream that begins with this block certainly is an answer. The block is
        not examined again when it passes."""
        # To search with TEXT costs ten times as much as to find the key.
        start = max(0, block.find(CHOICES_KEY))
        at, end = start, start + SHORT_BLOCK_BYTES
        text: re.Match[bytes] | None = None
        while text is None and (at := block.find(CONTENT_KEY, at + 1, end)) >= 0:
            text = TEXT.match(block, at)
        text = text or TEXT.search(block, start)
        if text is None:
            return False
        if not block.endswith(EVENT_ENDS) and end_of_last_event(block) <= text.end():
            return False
        if self._may_fail(block):
            return False
        self._checked = block
        return True

    async def first_output(self, answer: EngineAnswer, looks_ahead: bool = True) -> Json | None:
        """Wait for the first event of a stream with more than a role, and return it; None if the
        event certainly is text.

        With `looks_ahead`, return a failure among the events that arrived together with it instead.
        A stream of another endpoint than generation may begin with any event. Raises UpstreamError,
        and BrokenAnswerError for a stream that ends before such an event.
        """
        is_generation = self._is_generation
        block = await answer.peek_until(
            lambda block: self.accepts(block) or _find_output(block, is_generation) is not None
        )
        if self.accepts(block):
            return None
        found = _find_output(block, is_generation, looks_ahead)
        if found is None and len(block) <= HIGH_WATER:
            raise BrokenAnswerError("an event stream without output")
        return found

    def passing(self, block: bytes, last: bool) -> bytes:
        if self.failure is not None:
            return b""
        if (
            block.endswith(self._usual_end)
            and block.find(b"\n") == len(block) - 2
            and not may_have_fields(block)
        ):
            is_suspect = block.rfind(ERROR_KEY) >= 0
        else:
            if self.hides_fields:
                block = events_without_fields(block)
            is_suspect = self._note_end(block, last)
        if is_suspect:
            start, self.failure = failure_midway(block, self._role, last)
            block = block[:start]
        if last and self.failure is None and not self._is_whole(block):
            self.failure = BrokenAnswerError("an event stream that ended before its answer")
            block = block[: end_of_last_event(block)]
        is_last = last and self.failure is None
        if self.inner is not None:
            return self.inner.passing(block, is_last)
        if is_last:
            self.last, block = block, b""
        return block

    def _note_end(self, block: bytes, last: bool) -> bool:
        """Note what the block shows of the stream's end. Return True if it may have a failure."""
        at = -1 if self._is_several else block.rfind(FINISH_KEY)
        if at >= 0:
            if FINISH_REASON.match(block, at) is None:
                self._usual_end = block[at:]
            else:
                self._is_ended = True
        self._is_done = (
            self._is_done
            or block.startswith(DONE_EVENT)  # as it mostly comes: alone, or behind other events
            or block.endswith(DONE_AT_END)
            or says_done(block, last)
        )
        checked, self._checked = self._checked, b""
        if block is checked:
            return False
        return self._may_fail(block)

    def _may_fail(self, block: bytes) -> bool:
        """Return False if the block certainly reports no failure. Python finds bytes in half the
        time from the right."""
        if len(block) > SHORT_BLOCK_BYTES and not self._is_several:
            block = _last_events(block)
        return (
            block.rfind(ERROR_KEY) >= 0
            or block.rfind(ABORT_VALUE) >= 0
            or block.rfind(REJECTION_VALUE) >= 0
        )

    def _is_whole(self, ending: bytes) -> bool:
        return self._is_done or (self._is_ended and not ends_inside_event(ending))
