"""Check the fields of requests. Pure.

`find_invalid_field` finds what a decode engine would refuse, before a prefill engine works. The
router sends a prefill engine its own `max_tokens`, `min_tokens` and `stream` instead of the
client's, so a prefill engine cannot see what is wrong with these, and a decode engine would refuse
them only after the whole prefill. All other fields are sent unchanged, and a prefill engine refuses
them itself. The messages and rules are vLLM's (pydantic's, which accepts "5" and 5.0 as 5). A value
that some engine might accept or clamp is left to the engine.

The `require_` functions are for the dialects: they raise a BadRequestError that names the field.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping
from typing import NamedTuple

import orjson

from router.common.exact_json import dumps, loads, number
from router.openai.answers import Json
from router.openai.errors import BadRequestError

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
    """Return the first invalid field of a body, or None. `context` is the longest context length of
    the decode engines in tokens, as far as it is known."""
    found = None if _is_plainly_valid(body, context) else _invalid_value(body, is_chat, context)
    if found is None and context is not None and type(body.get("prompt")) is list and not is_chat:
        return _prompt_problem(body, context)
    return found


def _is_plainly_valid(body: Mapping[str, object], context: int | None) -> bool:
    """Recognize most valid bodies at a third of the cost of the full check."""
    if MAX_COMPLETION_TOKENS in body or MIN_TOKENS in body:
        return False
    most, stream = body.get(MAX_TOKENS), body.get(STREAM)
    if most is not None and not (type(most) is int and 0 < most <= (context or most)):
        return False
    options = body.get(STREAM_OPTIONS)
    if options is None:
        return stream is None or type(stream) is bool
    return stream is True and options == USAGE


def _invalid_value(
    body: Mapping[str, object], is_chat: bool, context: int | None
) -> InvalidField | None:
    most = body.get(MAX_TOKENS)
    name = MAX_TOKENS
    if is_chat and (given := body.get(MAX_COMPLETION_TOKENS)) is not None:
        if most is not None and (why := _integer_problem(most)):
            return InvalidField(MAX_TOKENS, why)
        most, name = given, MAX_COMPLETION_TOKENS
    if most is not None and (why := _integer_problem(most)):
        return InvalidField(name, why)
    least = body.get(MIN_TOKENS)
    if MIN_TOKENS in body and (why := _integer_problem(least)):
        return InvalidField(MIN_TOKENS, why)
    return (
        _out_of_range(name, _integer(most), _integer(least), body, is_chat, context)
        or _invalid_stream(body)
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
        # vLLM accepts 0 tokens for a completion that only echoes the prompt.
        is_echo = most == 0 and not is_chat and body.get("echo")
        if most < 1 and not is_echo:
            return InvalidField(MAX_TOKENS, f"max_tokens must be at least 1, got {most}.")
    if least is not None and least < 0:
        return InvalidField(
            MIN_TOKENS, f"min_tokens must be greater than or equal to 0, got {least}."
        )
    room = most or context
    return None if room is None or least is None else _min_tokens_problem(least, room)


def _min_tokens_problem(least: int, room: int) -> InvalidField | None:
    if least <= room:
        return None
    text = f"min_tokens must be less than or equal to max_tokens={room}, got {least}."
    return InvalidField(MIN_TOKENS, text)


def _invalid_stream(body: Mapping[str, object]) -> InvalidField | None:
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


def _prompt_problem(body: Mapping[str, object], context: int) -> InvalidField | None:
    """Check a prompt of token ids, whose length is known."""
    prompt = body["prompt"]
    assert isinstance(prompt, list)
    if len(prompt) == 1 and isinstance(prompt[0], list):
        prompt = prompt[0]
    count = len(prompt)
    if not count or type(prompt[0]) is not int or body.get("truncate_prompt_tokens"):
        return None
    if count <= context:
        return _min_tokens_problem(_integer(body.get(MIN_TOKENS)) or 0, context - count)
    text = (
        f"This model's maximum context length is {context} tokens. However, your prompt contains "
        f"{count} input tokens, which exceeds this limit even without any output tokens. "
        "Please reduce the length of the input prompt."
    )
    return InvalidField("input_tokens", text)


def _integer_problem(value: object) -> str:
    """Return why pydantic would not accept the value as an integer, empty if it would."""
    if isinstance(value, int):
        return ""
    if isinstance(value, float):
        return "" if value.is_integer() else f"{INTEGER}, got a number with a fractional part"
    if not isinstance(value, str):
        return INTEGER
    return "" if _is_number(value) else f"{INTEGER}, unable to parse string as an integer"


def _integer(value: object) -> int | None:
    """Return the integer, or None for other types; strings are left to the engine."""
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


def field_error(where: str, why: str) -> BadRequestError:
    return BadRequestError(f"{where}: {why}", where)


def unsupported_type(where: str, what: str, kind: object) -> BadRequestError:
    shown = repr(kind)[:80] if isinstance(kind, str) else "none"
    return field_error(where, f"{what} of type {shown} are not supported")


def require_text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise field_error(where, "must be a string")
    return value


def require_objects(value: object, where: str) -> list[Json]:
    """Return the value if it is a list of objects."""
    if not isinstance(value, list):
        raise field_error(where, "must be a list")
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise field_error(f"{where}[{index}]", "must be an object")
    return value


def require_object(value: object, where: str) -> Json:
    if not isinstance(value, dict):
        raise field_error(where, "must be an object")
    return value


def join_text_parts(parts: list[Json]) -> str | list[Json]:
    """Return one text if all parts are text: some chat templates accept no list of parts."""
    if all(part.get("type") == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def start_chat(
    body: Json,
    translated: Container[str],
    unsupported: Iterable[str],
    translate_tool: Callable[[Json, str], Json],
) -> Json:
    """Return the part of a chat request that all dialects translate alike: the fields that are not
    `translated`, the tools and the options of a stream. Raises BadRequestError."""
    for name in unsupported:
        if body.get(name):
            raise field_error(name, "is not supported")
    chat: Json = {name: body[name] for name in body if name not in translated}
    if body.get("stream"):
        chat[STREAM], chat[STREAM_OPTIONS] = body["stream"], {**USAGE}
    if body.get("tools"):
        tools = require_objects(body["tools"], "tools")
        chat["tools"] = [translate_tool(tool, f"tools[{n}]") for n, tool in enumerate(tools)]
    return chat


# Errors of prefill engines about a prompt that is too long. The router asks them for one token, and
# some say so: "you requested 4097 tokens (4096 in the messages, 1 in the completion)". The numbers
# for the prompt and the context are right.

# vLLM to 0.14.
REQUESTED = re.compile(
    r"you requested \d+ tokens "
    r"\((?P<prompt>\d+) in the (?P<what>\w+), 1 in the completion\)"
)
TOO_LARGE = re.compile(
    r"'max_tokens' or 'max_completion_tokens' is too large: 1\. (?P<context>[^()]{1,200}?)"
    r"(?P<prompt>\d+) input tokens \(1 > (?P<left>\d+ - \d+)\)"
)
# SGLang.
IN_ALL = re.compile(
    r"a total of \d+ tokens: (?P<prompt>\d+) tokens from the input messages and 1 tokens "
    r"for the completion"
)


def restate_prompt_limit(answer: bytes, asked: Mapping[str, object]) -> bytes:
    """Restate an error that mentions the one token of the prefill; return other answers unchanged.

    The length is replaced by the one that the client asked for, or left out if it gave none.
    """
    try:
        content = loads(answer)
    except orjson.JSONDecodeError:
        return answer
    error = content.get("error", content) if isinstance(content, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    if not isinstance(error, dict) or not isinstance(message, str):
        return answer
    restated = restate_message(message, _requested_tokens(asked))
    if restated == message:
        return answer
    error["message"] = restated
    return dumps(content)


def restate_message(message: str, max_tokens: int | None) -> str:
    """`max_tokens` is the length that the client asked for, None if it gave none."""
    if found := REQUESTED.search(message):
        count = int(found["prompt"])
        if max_tokens is None:
            restated = f"your request has {count} input tokens"
        else:
            parts = f"{count} in the {found['what']}, {max_tokens} in the completion"
            restated = f"you requested {count + max_tokens} tokens ({parts})"
    elif found := TOO_LARGE.search(message):
        tail = f"{found['context']}{found['prompt']} input tokens"
        if max_tokens is None:
            restated = tail
        else:
            head = f"'max_tokens' or 'max_completion_tokens' is too large: {max_tokens}. "
            restated = f"{head}{tail} ({max_tokens} > {found['left']})"
    elif found := IN_ALL.search(message):
        count = int(found["prompt"])
        if max_tokens is None:
            restated = f"{count} tokens from the input messages"
        else:
            ending = f"{max_tokens} tokens for the completion"
            parts = f"{count} tokens from the input messages and {ending}"
            restated = f"a total of {count + max_tokens} tokens: {parts}"
    else:
        return message
    return message[: found.start()] + restated + message[found.end() :]


def _requested_tokens(asked: Mapping[str, object]) -> int | None:
    for name in (MAX_COMPLETION_TOKENS, MAX_TOKENS):
        if type(given := asked.get(name)) is int:
            return given
    return None
