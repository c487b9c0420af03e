"""What a prefiller says of a prompt that is too long, in terms of what the client asked for. Pure.

A prefiller is asked for one token, and some engines tell so: "you requested 4097 tokens (4096 in
the messages, 1 in the completion)". Its numbers for the prompt and the context are right, the one
for the answer is ours: it is put right, or left out where the client named none.
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
    """The answer itself, unless it speaks of the one token that the client did not ask for."""
    try:
        content = loads(answer)
    except orjson.JSONDecodeError:
        return answer
    error = content.get("error", content) if isinstance(content, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    if not isinstance(error, dict) or not isinstance(message, str):
        return answer
    said = restate_message(message, _most(asked))
    if said == message:
        return answer
    error["message"] = said
    return dumps(content)


def restate_message(message: str, most: int | None) -> str:
    """`most`: tokens of answer that the client asked for; None where it named none."""
    if found := REQUESTED.search(message):
        count = int(found["prompt"])
        if most is None:
            said = f"your request has {count} input tokens"
        else:
            parts = f"{count} in the {found['what']}, {most} in the completion"
            said = f"you requested {count + most} tokens ({parts})"
    elif found := TOO_LARGE.search(message):
        tail = f"{found['context']}{found['prompt']} input tokens"
        if most is None:
            said = tail
        else:
            head = f"'max_tokens' or 'max_completion_tokens' is too large: {most}. "
            said = f"{head}{tail} ({most} > {found['left']})"
    elif found := IN_ALL.search(message):
        count = int(found["prompt"])
        if most is None:
            said = f"{count} tokens from the input messages"
        else:
            parts = f"{count} tokens from the input messages and {most} tokens for the completion"
            said = f"a total of {count + most} tokens: {parts}"
    else:
        return message
    return message[: found.start()] + said + message[found.end() :]


def _most(asked: Mapping[str, object]) -> int | None:
    for name in (MAX_COMPLETION_TOKENS, MAX_TOKENS):
        if type(given := asked.get(name)) is int:
            return given
    return None
