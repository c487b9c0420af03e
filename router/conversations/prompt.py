"""A prompt as something that another prompt may extend: a digest for each of its prefixes.

A chat is counted in messages, a text in characters, a list of token ids in ids. Two prompts of the
same kind with the same digest at `count` are equal up to there.

The digest of a message covers what a chat template may read: role, content, tool calls and whatever
else is set. It leaves out reasoning traces, because clients strip them; `traceless` tells where the
first one is.
"""

from __future__ import annotations

import hashlib
from typing import Any

import orjson

from router.common.exact_json import dumps
from router.common.structs import FrozenStruct
from router.conversations.entry import DIGEST_BYTES, PromptPrefix
from router.openai.answers import (
    REASONING_KEYS,
    AnswerChoice,
    Json,
    contains_think_mark,
    has_reasoning,
)


class Prompt(FrozenStruct, frozen=True):
    """A prompt of one `kind`: chat, text or tokens.

    `content` is a text, a list of token ids, or of a chat a digest for each number of leading
    messages, none included. `size` is in bytes, roughly. The first `traceless` units hold no
    reasoning trace, and the first `last_answer` messages end with the last one of the assistant.
    """

    kind: str
    content: tuple[str, ...] | str | list[int]
    size: int
    traceless: int
    has_media: bool = False
    last_answer: int = 0

    @property
    def count(self) -> int:
        """Units of the prompt."""
        return len(self.content) - isinstance(self.content, tuple)

    def digest_at(self, count: int) -> str | None:
        """Return the digest of the first `count` units; None where there are fewer."""
        if not 0 <= count <= self.count:
            return None
        content = self.content
        return content[count] if isinstance(content, tuple) else _flat_digest(content[:count])

    def with_answer(self, answer: AnswerChoice) -> PromptPrefix | None:
        """Return the prompt followed by its answer, as the next turn would repeat it.

        Returns None where the answer is of another kind.
        """
        whole: str | list[int]
        if isinstance(self.content, tuple):
            if answer.message is None:
                return None
            message = canonical({"role": "assistant", **answer.message})
            return PromptPrefix(self.count + 1, _chained(self.content[-1], message))
        if isinstance(self.content, str):
            if answer.text is None:
                return None
            whole = self.content + answer.text
        else:
            if answer.token_ids is None:
                return None
            whole = [*self.content, *answer.token_ids]
        return PromptPrefix(len(whole), _flat_digest(whole))


def prompt_of(body: Json) -> Prompt | None:
    """Return a request's prompt; None for one that cannot be compared with another prompt."""
    messages = body.get("messages")
    if isinstance(messages, list):
        return _chat(messages)
    prompt = body.get("prompt")
    if body.get("prompt_embeds") is not None or body.get("echo"):
        return None
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return Prompt("text", prompt, len(prompt), len(prompt))
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return Prompt("tokens", prompt, 4 * len(prompt), len(prompt))
    return None


def _chat(messages: list[Any]) -> Prompt:
    chain, size, has_media = [EMPTY_CHAT], 0, False
    first_trace = last_answer = 0
    for number, message in enumerate(messages, 1):
        text = _plain_text(message)
        content = canonical(message) if text is None else _dump(message)
        size += len(content)
        chain.append(_chained(chain[-1], content))
        if text is not None:
            first_trace = first_trace or (number if contains_think_mark(text) else 0)
        elif isinstance(message, dict):
            has_media = has_media or _has_media(message)
            first_trace = first_trace or (number if has_reasoning(message) else 0)
        if isinstance(message, dict) and message.get("role") == "assistant":
            last_answer = number
    traceless = first_trace - 1 if first_trace else len(messages)
    return Prompt("chat", tuple(chain), size, traceless, has_media, last_answer)


def _plain_text(message: object) -> str | None:
    """Return the text of a message that has only role and text: it is canonical as it stands."""
    if type(message) is not dict or len(message) != 2:
        return None
    text = message.get("content")
    return text if text and type(text) is str and message.get("role") else None


def canonical(message: object) -> bytes:
    """Return a message as bytes that are equal for an engine's answer and a client's repetition."""
    if not isinstance(message, dict) or _plain_text(message) is not None:
        return _dump(message)
    kept = {
        name: value
        for name, value in message.items()
        if name not in REASONING_KEYS and value not in (None, "", [], {})
    }
    content = kept.get("content")
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):
        part = content[0]  # a single part of text is equivalent to the text
        if part.keys() == {"type", "text"} and part["type"] == "text":
            kept["content"] = part["text"]
    calls = kept.get("tool_calls")
    if isinstance(calls, list):
        kept["tool_calls"] = [_canonical_call(call) for call in calls]
    return _dump(kept)


def _canonical_call(call: object) -> object:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    function = call["function"]
    return [call.get("id"), function.get("name"), function.get("arguments")]


def _has_media(message: Json) -> bool:
    content = message.get("content")
    if not isinstance(content, list):
        return False
    return any(isinstance(part, dict) and part.get("type") != "text" for part in content)


def _dump(value: object) -> bytes:
    return dumps(value, orjson.OPT_SORT_KEYS)


def _chained(previous: str, content: bytes) -> str:
    return _digest(previous.encode("ascii") + content)


def _flat_digest(content: str | list[int]) -> str:
    if isinstance(content, str):
        return _digest(content.encode("utf-8", "surrogatepass"))
    return _digest(dumps(content))


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).hexdigest()


EMPTY_CHAT = _digest(b"chat")
