"""Read an engine's answer: whole, or put together from the chunks of a stream; and the other way
round, make a stream of a whole answer.

Where the events of a stream end is for `router.http_client.sse`. What is looked for in bytes here,
before any JSON is decoded, is a key or a string with its quotes: no text of a model can be taken
for it, since quotes inside JSON strings are escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import orjson
from msgspec import Struct

from router.common.exact_json import dumps, loads, loads_leniently, number
from router.http_client.sse import (
    GAP,
    SseEvent,
    data_in,
    data_of,
    end_of_last_event,
    events_in,
    says_done,
)

Json = dict[str, Any]
# The finish reason or stop reason of an engine whose cache holds less than the threshold.
REJECTION = "cache_threshold"
MAX_TOKEN_COUNT = 10**15
TOKEN_IDS = re.compile(r"(?:[A-Za-z0-9+/]{4})+")
# A token id has three bytes, which are four characters in base64.
TOKEN_ID_CHARS = 4
DONE = b"data: [DONE]\n\n"
FIELDS_NOT_IN_CHUNKS = ("choices", "usage", "object", "prompt_logprobs", "prompt_token_ids")
# The `object` of a chunk, by the `object` of the complete answer.
CHUNK_OBJECTS = {
    "chat.completion": "chat.completion.chunk",
    "text_completion": "text_completion",
}
# Without one of these strings, JSON text or the events of a stream certainly report no failure.
ERROR_KEY = b'"error"'
ABORT_VALUE, REJECTION_VALUE = b'"abort"', b'"cache_threshold"'
FINISH_KEY = b'finish_reason"'
# A finish reason that is not null. What begins with letters is found sooner: the quote before the
# key is looked at second.
FINISH_REASON = re.compile(FINISH_KEY + b'(?<="finish_reason")' + GAP + b'"([^"]+)"')
# Finish reasons of an answer that its engine did not complete.
BROKEN_OFF = frozenset((b"abort", b"error", b"cache_threshold"))
# Fields of a choice and of its delta that are no output.
NO_OUTPUT = frozenset(("index", "role", "delta", "finish_reason", "stop_reason"))


class AnswerChoice(Struct, frozen=True):
    """The only choice of an answer: `message` of a chat, `text` and `token_ids` of a completion."""

    message: Json | None = None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    prompt_tokens: int | None = None


def read_choice(answer: Json) -> AnswerChoice | None:
    """Return the choice of an answer, or None unless it has exactly one. Never raises."""
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
    if not isinstance(choice, dict):
        return None
    prompt_tokens = prompt_tokens_of(answer)
    message = choice.get("message")
    if isinstance(message, dict):
        return AnswerChoice(message=message, prompt_tokens=prompt_tokens)
    text = choice.get("text")
    if not isinstance(text, str):
        return None
    return AnswerChoice(None, text, _ids(choice.get("token_ids")), prompt_tokens)


def read_streamed_choice(chunks: Iterable[Json]) -> AnswerChoice | None:
    """Return the choice of a stream, or None unless it has exactly one."""
    message: Json = {}
    texts: list[str] = []
    token_ids: list[int] = []
    is_chat, usage = False, None
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for choice in choices_of(chunk):
            if choice.get("index", 0) != 0:
                return None
            delta = choice.get("delta")
            if isinstance(delta, dict):
                is_chat = True
                _add_delta(message, delta)
            elif isinstance(choice.get("text"), str):
                texts.append(choice["text"])
            token_ids += _ids(choice.get("token_ids")) or ()
    prompt_tokens = count_in(usage, "prompt_tokens")
    if is_chat:
        return AnswerChoice(message=message, prompt_tokens=prompt_tokens)
    return AnswerChoice(None, "".join(texts), tuple(token_ids) or None, prompt_tokens)


def _add_delta(message: Json, delta: Json) -> None:
    for name, value in delta.items():
        if name == "tool_calls":
            calls = message.setdefault("tool_calls", [])
            for part in _dicts(value):
                _add_call(calls, part)
        elif isinstance(value, str) and name != "role":
            message[name] = _longer(message.get(name), value)
        elif value is not None:
            message[name] = value


def _add_call(calls: list[Json], part: Json) -> None:
    """Add a piece of a tool call: its name comes first, its arguments follow in pieces."""
    index = part.get("index", len(calls))
    call = next((known for known in calls if known.get("index") == index), None)
    given = part.get("function")
    function: Json = given if isinstance(given, dict) else {}
    if call is None:
        calls.append({**part, "index": index, "function": {**function}})
        return
    for name, value in function.items():
        if isinstance(value, str):
            call["function"][name] = _longer(call["function"].get(name), value)


def _longer(text: object, more: str) -> str:
    """Append to a text; a value of another type is replaced."""
    return text + more if isinstance(text, str) else more


def parse_object(raw: bytes) -> Json | None:
    """Return the JSON object, or None if the bytes are no JSON object. An object with values that
    JSON lacks is read, too: see `loads_leniently`."""
    try:
        content = loads(raw)
    except orjson.JSONDecodeError:
        try:
            content = loads_leniently(raw)
        except orjson.JSONDecodeError:
            return None
    return content if isinstance(content, dict) else None


def prompt_tokens_of(answer: Json) -> int | None:
    return count_in(answer.get("usage"), "prompt_tokens")


def cached_tokens_of(answer: Json) -> int | None:
    """Return how many prompt tokens were served from cache, or None if the engine reports none."""
    usage = answer.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    return count_in(details, "cached_tokens")


def count_in(usage: object, name: str) -> int | None:
    """Return a count of tokens, or None if it is missing or not a plausible one: it may be too
    large for a float."""
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if type(value) is int and 0 <= value <= MAX_TOKEN_COUNT else None


def choices_of(answer: Json) -> list[Json]:
    """Return the choices of an answer or a chunk that are JSON objects. Never raises."""
    return _dicts(answer.get("choices"))


def is_rejection(content: Json) -> bool:
    """Return True if an answer or a chunk reports that the engine's cache holds too little."""
    return any(
        REJECTION in (choice.get("finish_reason"), choice.get("stop_reason"))
        for choice in choices_of(content)
    )


def _dicts(value: object) -> list[Json]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def ids_in(value: object) -> list[int] | None:
    """Return a list of token ids, None for anything else and for an empty list."""
    if not isinstance(value, list) or not value or any(type(item) is not int for item in value):
        return None
    return value


def _ids(value: object) -> tuple[int, ...] | None:
    ids = ids_in(value)
    return None if ids is None else tuple(ids)


def can_stream(content: Json) -> bool:
    """Return True if the content is a chat completion or a completion with choices."""
    kind, choices = content.get("object"), content.get("choices")
    if not isinstance(kind, str) or not isinstance(choices, list) or not choices:
        return False
    return kind in CHUNK_OBJECTS and all(isinstance(choice, dict) for choice in choices)


def stream_events(answer: Json, request: Json) -> bytes:
    """Return the complete stream for an answer for which `can_stream` is true.

    The stream ends with a usage chunk if the body of the request asks for one.
    """
    head = {name: answer[name] for name in answer if name not in FIELDS_NOT_IN_CHUNKS}
    head["object"] = CHUNK_OBJECTS[answer["object"]]
    options = request.get("stream_options")
    with_usage = isinstance(options, dict) and bool(number(options.get("include_usage")))
    common: Json = {"usage": None} if with_usage else {}
    chunks = [
        {**head, "choices": [piece], **common}
        for choice in answer["choices"]
        for piece in _deltas(choice)
    ]
    if with_usage:
        chunks.append({**head, "choices": [], "usage": answer.get("usage")})
    return b"".join(b"data: " + dumps(chunk) + b"\n\n" for chunk in chunks) + DONE


def _deltas(choice: Json) -> list[Json]:
    message = choice.get("message")
    if not isinstance(message, dict):
        return [choice]
    index = choice.get("index", 0)
    delta = {name: value for name, value in message.items() if value not in (None, [], "")}
    opening = {"role": delta.pop("role", "assistant"), "content": ""}
    if isinstance(delta.get("tool_calls"), list):
        delta["tool_calls"] = [
            {"index": place, **call} if isinstance(call, dict) else call
            for place, call in enumerate(delta["tool_calls"])
        ]
    rest = {name: value for name, value in choice.items() if name not in ("message", "index")}
    return [
        {"index": index, "delta": opening, "logprobs": None, "finish_reason": None},
        {"index": index, "delta": delta, **rest},
    ]


class GeneratedTokens(msgspec.Struct, gc=False):
    """The tokens of an unfinished answer, which an engine returns for another one to continue.

    Token ids are in base64, three bytes each. `spoken` counts the tokens that the client has;
    `logprobs` are the log-probabilities of the others. The names are those of the wire format.
    """

    prompt_token_ids: str
    output_token_ids: str
    spoken: int = 0
    logprobs: msgspec.Raw = msgspec.Raw(b"")

    @property
    def is_resumable(self) -> bool:
        """True if the client has none of the tokens, and the ids are well formed and not empty."""
        ids = (self.prompt_token_ids, self.output_token_ids)
        return not self.spoken and all(map(TOKEN_IDS.fullmatch, ids))


class _Params(msgspec.Struct, gc=False):
    begun: GeneratedTokens


_params = msgspec.json.Decoder(_Params).decode


def read_generated_tokens(params: bytes) -> GeneratedTokens | None:
    """Read them from kv_transfer_params, or return None if no engine can continue from them."""
    try:
        begun = _params(params).begun
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    return begun if begun.is_resumable else None


# The events of a stream.


def json_events(block: bytes, at_end: bool = False) -> Iterator[tuple[SseEvent, Json]]:
    """Yield the events of a block whose data are JSON objects. `at_end`: as for `events_in`."""
    for event in events_in(block, at_end):
        if event.data is not None and (content := parse_object(event.data)) is not None:
            yield event, content


def chunks_in(stream: bytes) -> Iterator[Json]:
    """Yield the JSON objects of a stream's events, of one that has not ended, too."""
    for data in data_in(stream):
        if (content := parse_object(data)) is not None:
            yield content


def error_in(content: Json) -> object:
    """Return what a chunk or an answer reports as an error, None if it reports none.

    That is its `error`, unless output stands beside it, or all of an object that says of itself
    that it is an error, as vLLM's before 0.10 and some events do.
    """
    error = content.get("error")
    if error and not any(map(has_output, choices_of(content))):
        return error
    return content if "error" in (content.get("object"), content.get("type")) else None


def has_output(choice: Json) -> bool:
    """Return True if a choice has a finish reason or more than a role."""
    delta = choice.get("delta")
    fields = {**choice, **delta} if isinstance(delta, dict) else choice
    return bool(choice.get("finish_reason")) or any(
        value for name, value in fields.items() if name not in NO_OUTPUT
    )


def ends_inside_event(ending: bytes) -> bool:
    """Return True if a stream with this end stops inside an event and has sent no [DONE]. Comments
    and a JSON object are whole without the empty line behind them."""
    rest = ending[end_of_last_event(ending) :].strip()
    if all(line.startswith(b":") for line in rest.splitlines()) or says_done(ending, at_end=True):
        return False
    data = data_of(rest)
    return data is None or parse_object(data) is None
