"""State engines' errors about the length of a prompt as the APIs' makers do. Pure.

Clients of Anthropic's API read these sentences: Claude Code compacts the conversation after "prompt
is too long", and asks for a shorter answer after "input length and `max_tokens` exceed context
limit". Clients of OpenAI's look for a code: Codex compacts only after "context_length_exceeded".
Engines use sentences of their own, and no code.
"""

from __future__ import annotations

import math
import re

from router.common.exact_json import dumps
from router.openai.answers import Json, parse_object

NUMBER = r"\d{1,15}"
CONTEXT, PROMPT, ASKED = (
    f"(?P<{name}>{NUMBER})" for name in ("context", "prompt", "asked")
)  # in tokens
PATTERNS = tuple(
    re.compile(pattern)
    for pattern in (
        # vLLM, and the reference engine
        rf"maximum context length is {CONTEXT} tokens\. However, (?:you requested {ASKED} output "
        rf"tokens and )?your prompt contains (?:at least )?{PROMPT} input tokens",
        rf"maximum context length is {CONTEXT} tokens\. However, (?:you requested {NUMBER} output "
        rf"tokens and )?your prompt contains (?P<chars>{NUMBER}) characters \(more than "
        rf"(?P<most_chars>{NUMBER}) characters, which is the upper bound for "
        rf"(?P<most_tokens>{NUMBER}) input tokens",
        rf"maximum context length is {CONTEXT} tokens\. However, you requested {NUMBER} tokens "
        rf"\({PROMPT} in the \w{{1,20}}, {ASKED} in the completion\)",
        rf"maximum context length is {CONTEXT} tokens(?: and|\. However,) your request has "
        rf"{PROMPT} input tokens(?: \({ASKED} > )?",
        rf"maximum context length is {CONTEXT} tokens\. However, your messages resulted in "
        rf"{PROMPT} tokens",
        rf"Input length \({PROMPT}\) exceeds model's maximum context length \({CONTEXT}\)",
        rf"prompt \((?:total )?length {PROMPT}\) is (?:too long to fit into the model \(context "
        rf"length|longer than the maximum model length of) {CONTEXT}",
        # SGLang
        rf"input \({PROMPT} tokens\) is longer than the model's context length \({CONTEXT} tokens",
        rf"maximum context length of {CONTEXT} tokens\. You requested a total of {NUMBER} tokens: "
        rf"{PROMPT} tokens from the input messages(?: and {ASKED} tokens for the completion)?",
    )
)
# Longer messages than those of engines are not searched further.
MAX_SEARCHED_CHARS = 2000
CONTEXT_EXCEEDED = "context_length_exceeded"


def with_context_code(error: Json) -> Json:
    """Return OpenAI's error object with the code of a prompt that is too long, if it is of one."""
    message = error.get("message")
    is_of_length = isinstance(message, str) and _find_lengths(message) is not None
    return {**error, "code": CONTEXT_EXCEEDED} if is_of_length else error


def body_with_context_code(body: bytes) -> bytes:
    """Do the same to the body of an engine's error; another one is returned unchanged."""
    content = parse_object(body) or {}
    error = content.get("error", content)
    if not isinstance(error, dict) or (coded := with_context_code(error)) is error:
        return body
    return dumps({**content, "error": coded} if "error" in content else coded)


def _find_lengths(message: str) -> re.Match[str] | None:
    searched = message[:MAX_SEARCHED_CHARS]
    return next(filter(None, (pattern.search(searched) for pattern in PATTERNS)), None)


def as_anthropic_states(message: str) -> str:
    """Return Anthropic's sentence for an engine's error about the length of a prompt, and other
    messages unchanged."""
    found = _find_lengths(message)
    if found is None:
        return message
    given = {name: int(text) for name, text in found.groupdict().items() if text is not None}
    context, asked = given["context"], given.get("asked")
    prompt = given.get("prompt")
    if prompt is None:  # the least number of tokens that so many characters can be
        most_chars = max(1, given["most_chars"])
        prompt = max(math.ceil(given["chars"] * given["most_tokens"] / most_chars), context + 1)
    if asked is not None and prompt < context:
        return (
            f"input length and `max_tokens` exceed context limit: {prompt} + {asked} > {context}, "
            "decrease input length or `max_tokens` and try again"
        )
    # A prompt that fills the context leaves no room for an answer.
    return f"prompt is too long: {prompt} tokens > {min(context, prompt - 1)} maximum"
