"""Restate a prefill engine's error about a prompt that is too long. Pure.

The router asks a prefill engine for one token, and some engines say so in their error: "you
requested 4097 tokens (4096 in the messages, 1 in the completion)". The numbers for the prompt and
the context are right. The number for the answer is replaced by the one that the client asked for,
or left out if the client gave none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import orjson

from router.common.exact_json import dumps, loads
from router.openai.request_fields import MAX_COMPLETION_TOKENS, MAX_TOKENS

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
    """Return the answer, with its message restated if it mentions the one token of the prefill."""
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
