"""What a decoder would refuse for its fields, refused before a prefiller works. Pure.

A prefiller is sent its own `max_tokens`, `min_tokens` and `stream` in the place of the client's, so
what is wrong with these it cannot see, and a decoder says so after the whole prefill. All the other
fields a prefiller is sent as they came, and refuses by itself, in its own words, before it works.

The words and the rules are vLLM's (pydantic's, which takes "5" and 5.0 for 5); what an engine
might take in another way, or cut to what fits, is left to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from router.common.exact_json import number

MAX_TOKENS, MIN_TOKENS = "max_tokens", "min_tokens"
MAX_COMPLETION_TOKENS = "max_completion_tokens"
STREAM, STREAM_OPTIONS = "stream", "stream_options"
USAGE = {"include_usage": True}
OPTIONS = ("include_usage", "continuous_usage_stats")
BOOLEANS = frozenset(["0", "1", "true", "false", "on", "off", "t", "f", "y", "n", "yes", "no"])
INTEGER = "Input should be a valid integer"
BOOLEAN = "Input should be a valid boolean"


class InvalidField(NamedTuple):
    field: str
    message: str


def find_invalid_field(
    body: Mapping[str, object], is_chat: bool, context: int | None
) -> InvalidField | None:
    """The first thing wrong with the body. `context`: of the decoder that has the longest, as far
    as that is known."""
    found = None if _is_usual(body, context) else _wrong_value(body, is_chat, context)
    if found is None and context is not None and type(body.get("prompt")) is list and not is_chat:
        return _without_room(body, context)
    return found


def _is_usual(body: Mapping[str, object], context: int | None) -> bool:
    """As most are, and nothing wrong with it: seen at a third of the price."""
    if MAX_COMPLETION_TOKENS in body or MIN_TOKENS in body:
        return False
    most, stream = body.get(MAX_TOKENS), body.get(STREAM)
    if most is not None and not (type(most) is int and 0 < most <= (context or most)):
        return False
    options = body.get(STREAM_OPTIONS)
    if options is None:
        return stream is None or type(stream) is bool
    return stream is True and options == USAGE


def _wrong_value(
    body: Mapping[str, object], is_chat: bool, context: int | None
) -> InvalidField | None:
    most = body.get(MAX_TOKENS)
    name = MAX_TOKENS
    if is_chat and (given := body.get(MAX_COMPLETION_TOKENS)) is not None:
        if most is not None and (why := _why_no_integer(most)):
            return InvalidField(MAX_TOKENS, why)
        most, name = given, MAX_COMPLETION_TOKENS
    if most is not None and (why := _why_no_integer(most)):
        return InvalidField(name, why)
    least = body.get(MIN_TOKENS)
    if MIN_TOKENS in body and (why := _why_no_integer(least)):
        return InvalidField(MIN_TOKENS, why)
    return (
        _out_of_range(name, _integer(most), _integer(least), body, is_chat, context)
        or _wrong_stream(body)
    )  # fmt: skip


def _out_of_range(
    name: str,
    most: int | None,
    least: int | None,
    body: Mapping[str, object],
    is_chat: bool,
    context: int | None,
) -> InvalidField | None:
    if most is not None:
        if context is not None and most > context:
            text = f"{name}={most} cannot be greater than max_model_len={context}. "
            return InvalidField(name, f"{text}Please request fewer output tokens.")
        # The prompt alone, said back: vLLM takes 0 for that.
        is_echo = most == 0 and not is_chat and body.get("echo")
        if most < 1 and not is_echo:
            return InvalidField(MAX_TOKENS, f"max_tokens must be at least 1, got {most}.")
    if least is not None and least < 0:
        return InvalidField(
            MIN_TOKENS, f"min_tokens must be greater than or equal to 0, got {least}."
        )
    room = most or context
    return None if room is None or least is None else _too_many(least, room)


def _too_many(least: int, room: int) -> InvalidField | None:
    if least <= room:
        return None
    text = f"min_tokens must be less than or equal to max_tokens={room}, got {least}."
    return InvalidField(MIN_TOKENS, text)


def _wrong_stream(body: Mapping[str, object]) -> InvalidField | None:
    stream = body.get(STREAM)
    if stream is not None and not _is_boolean(stream):
        return InvalidField(STREAM, f"{STREAM}: {BOOLEAN}")
    options = body.get(STREAM_OPTIONS)
    if options is None:
        return None
    if options and not stream:
        text = "Stream options can only be defined when `stream=True`."
        return InvalidField(STREAM_OPTIONS, text)
    if not isinstance(options, dict):
        return InvalidField(STREAM_OPTIONS, f"{STREAM_OPTIONS}: Input should be a valid dictionary")
    for name in OPTIONS:
        value = number(options.get(name))
        if value is not None and not _is_boolean(value):
            return InvalidField(STREAM_OPTIONS, f"{STREAM_OPTIONS}.{name}: {BOOLEAN}")
    return None


def _without_room(body: Mapping[str, object], context: int) -> InvalidField | None:
    """Of a prompt of token ids: then it is known how many there are."""
    prompt = body["prompt"]
    assert isinstance(prompt, list)
    if len(prompt) == 1 and isinstance(prompt[0], list):
        prompt = prompt[0]
    count = len(prompt)
    if not count or type(prompt[0]) is not int or body.get("truncate_prompt_tokens"):
        return None
    if count <= context:
        return _too_many(_integer(body.get(MIN_TOKENS)) or 0, context - count)
    text = (
        f"This model's maximum context length is {context} tokens. However, your prompt contains "
        f"{count} input tokens, which exceeds this limit even without any output tokens. "
        "Please reduce the length of the input prompt."
    )
    return InvalidField("input_tokens", text)


def _why_no_integer(value: object) -> str:
    """Empty for what pydantic makes an integer of."""
    if isinstance(value, int):
        return ""
    if isinstance(value, float):
        return "" if value.is_integer() else f"{INTEGER}, got a number with a fractional part"
    if not isinstance(value, str):
        return INTEGER
    return "" if _is_number(value) else f"{INTEGER}, unable to parse string as an integer"


def _integer(value: object) -> int | None:
    """None of what is none, and of a string: what that comes to is for the engine to say."""
    return int(value) if isinstance(value, int | float) else None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_boolean(value: object) -> bool:
    if isinstance(value, str):
        return value.lower() in BOOLEANS
    return isinstance(value, int | float) and value in (0, 1)
