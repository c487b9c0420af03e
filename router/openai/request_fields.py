"""Check the fields of requests. Pure.

`find_invalid_field` finds what a decode engine would refuse, before a prefill engine works. The
router sends a prefill engine its own `max_tokens`, `min_tokens` and `stream` instead of the
client's, so a prefill engine cannot see what is wrong with these, and a decode engine would refuse
them only after the whole prefill. All other fields are sent unchanged, and a prefill engine refuses
them itself. The messages and rules are vLLM's. A value that some engine might accept or clamp is
left to the engine.

vLLM reads "5" and 5.0 as 5, and "false", "off" and 0 as False. `read_fields` lets pydantic read the
fields that the router itself acts on, as vLLM does, for all APIs. Engines get what was read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from router.common.exact_json import dumps, number
from router.openai.answers import Json, parse_object

MAX_TOKENS, MIN_TOKENS = "max_tokens", "min_tokens"
MAX_COMPLETION_TOKENS, MAX_OUTPUT_TOKENS = "max_completion_tokens", "max_output_tokens"
STREAM, STREAM_OPTIONS = "stream", "stream_options"
USAGE = {"include_usage": True}
OPTIONS = ("include_usage", "continuous_usage_stats")
READERS: dict[type, Callable[[object], object]] = {
    bool: TypeAdapter(bool).validate_python,
    int: TypeAdapter(int).validate_python,
}
# The fields that the router acts on.
INTEGERS = (
    "n", "best_of", MAX_TOKENS, MAX_COMPLETION_TOKENS, MAX_OUTPUT_TOKENS, MIN_TOKENS,
    "prompt_logprobs", "top_logprobs",
)  # fmt: skip
BOOLEANS = (
    STREAM, "background", "echo", "logprobs", "parallel_tool_calls", "return_token_ids", "store",
    "use_beam_search",
)  # fmt: skip
FIELD_TYPES: dict[str, type] = {**dict.fromkeys(INTEGERS, int), **dict.fromkeys(BOOLEANS, bool)}
COMPLETION_FIELD_TYPES = {**FIELD_TYPES, "logprobs": int}


class InvalidField(NamedTuple):
    field: str
    message: str


def read_fields(body: Json, types: Mapping[str, type] = FIELD_TYPES) -> Json:
    """Return the body with the integers and booleans that vLLM accepts in another type as what they
    mean. A number like 5.0 stays as it was written, and so does a value that vLLM refuses. A body
    without such values is returned itself."""
    read: Json = {}
    for name, value in body.items():
        kind = types.get(name)
        if kind is None or type(value) is kind or value is None:
            continue
        if kind is bool or not isinstance(value, float):
            with suppress(ValidationError):
                read[name] = READERS[kind](value)
    options = body.get(STREAM_OPTIONS)
    if isinstance(options, dict):
        texts = {name: options[name] for name in OPTIONS if isinstance(options.get(name), str)}
        if texts:
            read[STREAM_OPTIONS] = {**options, **read_fields(texts, dict.fromkeys(OPTIONS, bool))}
    return {**body, **read} if read else body


def field_problem(value: object, kind: type) -> str:
    """Return why pydantic does not accept a value as the type, empty if it does."""
    if type(value) is kind:
        return ""
    try:
        READERS[kind](value)
    except ValidationError as error:
        return error.errors(include_url=False)[0]["msg"]
    return ""


def find_invalid_field(
    body: Mapping[str, object], is_chat: bool, context: int | None
) -> InvalidField | None:
    """Return the first invalid field of a body, or None. `context` is the longest context length of
    the decode engines in tokens, as far as it is known."""
    found = _invalid_value(body, is_chat, context)
    if found is None and context is not None and type(body.get("prompt")) is list and not is_chat:
        return _prompt_problem(body, context)
    return found


def _invalid_value(
    body: Mapping[str, object], is_chat: bool, context: int | None
) -> InvalidField | None:
    lengths = (MAX_TOKENS, MAX_COMPLETION_TOKENS) if is_chat else (MAX_TOKENS,)
    given = [name for name in lengths if body.get(name) is not None]
    for name in (*given, MIN_TOKENS):
        if name in body and (why := field_problem(body[name], int)):
            return InvalidField(name, why)
    name = given[-1] if given else MAX_TOKENS
    most, least = _integer(body.get(name)), _integer(body.get(MIN_TOKENS))
    if most is not None and context is not None and most > context:
        text = f"{name}={most} cannot be greater than max_model_len={context}. "
        return InvalidField(name, f"{text}Please request fewer output tokens.")
    # vLLM accepts 0 tokens for a completion that only echoes the prompt.
    is_echo = most == 0 and not is_chat and body.get("echo")
    if most is not None and most < 1 and not is_echo:
        return InvalidField(MAX_TOKENS, f"max_tokens must be at least 1, got {most}.")
    if least is not None and least < 0:
        text = f"min_tokens must be greater than or equal to 0, got {least}."
        return InvalidField(MIN_TOKENS, text)
    room = most or context
    wrong = None if room is None or least is None else _min_tokens_problem(least, room)
    return wrong or _invalid_stream(body)


def _min_tokens_problem(least: int, room: int) -> InvalidField | None:
    if least <= room:
        return None
    text = f"min_tokens must be less than or equal to max_tokens={room}, got {least}."
    return InvalidField(MIN_TOKENS, text)


def _invalid_stream(body: Mapping[str, object]) -> InvalidField | None:
    stream = body.get(STREAM)
    if stream is not None and (why := field_problem(stream, bool)):
        return InvalidField(STREAM, f"{STREAM}: {why}")
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
        if value is not None and (why := field_problem(value, bool)):
            return InvalidField(STREAM_OPTIONS, f"{STREAM_OPTIONS}.{name}: {why}")
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


def _integer(value: object) -> int | None:
    """Return the integer, or None for other types; strings are left to the engine."""
    return int(value) if isinstance(value, int | float) else None


# Errors of prefill engines about a prompt that is too long. The router asks them for one token, and
# some say so: "you requested 4097 tokens (4096 in the messages, 1 in the completion)". The numbers
# for the prompt and the context are right. Each pattern has the text for the length that the client
# asked for, and the text if it gave none.
RESTATED = (
    (  # vLLM to 0.14
        r"you requested \d+ tokens "
        r"\((?P<prompt>\d{1,15}) in the (?P<what>\w+), 1 in the completion\)",
        "you requested {total} tokens ({prompt} in the {what}, {asked} in the completion)",
        "your request has {prompt} input tokens",
    ),
    (
        r"'max_tokens' or 'max_completion_tokens' is too large: 1\. (?P<context>[^()]{1,200}?)"
        r"(?P<prompt>\d{1,15}) input tokens \(1 > (?P<left>\d+ - \d+)\)",
        "'max_tokens' or 'max_completion_tokens' is too large: {asked}. {context}{prompt} input "
        "tokens ({asked} > {left})",
        "{context}{prompt} input tokens",
    ),
    (  # SGLang
        r"a total of \d+ tokens: (?P<prompt>\d{1,15}) tokens from the input messages and 1 tokens "
        r"for the completion",
        "a total of {total} tokens: {prompt} tokens from the input messages and {asked} tokens for "
        "the completion",
        "{prompt} tokens from the input messages",
    ),
)


def restate_prompt_limit(answer: bytes, asked: Mapping[str, object]) -> bytes:
    """Restate an error that mentions the one token of the prefill; return other answers unchanged.

    The length is replaced by the one that the client asked for, or left out if it gave none.
    """
    content = parse_object(answer)
    error = None if content is None else content.get("error", content)
    message = error.get("message") if isinstance(error, dict) else None
    if not isinstance(error, dict) or not isinstance(message, str):
        return answer
    lengths = (asked.get(name) for name in (MAX_COMPLETION_TOKENS, MAX_TOKENS))
    restated = restate_message(message, next((n for n in lengths if type(n) is int), None))
    if restated == message:
        return answer
    error["message"] = restated
    return dumps(content)


def restate_message(message: str, max_tokens: int | None) -> str:
    """`max_tokens` is the length that the client asked for, None if it gave none."""
    for pattern, with_length, without_length in RESTATED:
        if found := re.search(pattern, message):
            text = without_length if max_tokens is None else with_length
            total = int(found["prompt"]) + (max_tokens or 0)
            restated = text.format(**found.groupdict(), asked=max_tokens, total=total)
            return message[: found.start()] + restated + message[found.end() :]
    return message
