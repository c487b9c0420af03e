"""A prompt as something that another prompt may extend: a digest for each of its beginnings.

A chat is counted in messages, a text in characters, a list of token ids in ids. Digests are
chained, so two prompts with the same digest at `count` are equal up to there.

Of a message counts what a chat template may read: role, content, tool calls and whatever else is
set. Reasoning does not, because clients strip it; where it is, is known separately (`plain`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import orjson

from router.common.exact_json import dumps
from router.common.records import Value
from router.conversations.entry import DIGEST_BYTES, PromptPrefix
from router.openai.answers import (
    REASONING_KEYS,
    AnswerChoice,
    Json,
    contains_think_mark,
    has_reasoning,
)

# Of a message that is nothing but text.
PLAIN = ("role", "content")


class Prompt(Protocol):
    """Pure; `size` is in bytes, roughly. The first `plain` units hold no reasoning trace."""

    @property
    def kind(self) -> str: ...
    @property
    def count(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def plain(self) -> int: ...
    @property
    def has_media(self) -> bool: ...

    def digest_at(self, count: int) -> str | None:
        """Of the first `count` units; None where there are fewer."""

    def with_answer(self, said: AnswerChoice) -> PromptPrefix | None:
        """The prompt followed by what was answered, as a next turn would repeat it."""


class ChatPrompt(Value, frozen=True):
    chain: tuple[str, ...]
    size: int
    plain: int
    has_media: bool
    last_answer: int
    """How many messages there are up to the last assistant's."""
    kind: str = "chat"

    @property
    def count(self) -> int:
        return len(self.chain) - 1

    def digest_at(self, count: int) -> str | None:
        return self.chain[count] if 0 <= count <= self.count else None

    def with_answer(self, said: AnswerChoice) -> PromptPrefix | None:
        if said.message is None:
            return None
        message = {"role": "assistant", **said.message}
        return PromptPrefix(self.count + 1, _chained(self.chain[-1], canonical(message)))


class TextPrompt(Value, frozen=True):
    text: str
    kind: str = "text"
    has_media: bool = False

    @property
    def count(self) -> int:
        return len(self.text)

    @property
    def size(self) -> int:
        return len(self.text)

    @property
    def plain(self) -> int:
        return len(self.text)

    def digest_at(self, count: int) -> str | None:
        if not 0 <= count <= len(self.text):
            return None
        return _digest(self.text[:count].encode("utf-8", "surrogatepass"))

    def with_answer(self, said: AnswerChoice) -> PromptPrefix | None:
        if said.text is None:
            return None
        whole = self.text + said.text
        return PromptPrefix(len(whole), _digest(whole.encode("utf-8", "surrogatepass")))


class TokenPrompt(Value, frozen=True):
    token_ids: Sequence[int]
    kind: str = "tokens"
    has_media: bool = False

    @property
    def count(self) -> int:
        return len(self.token_ids)

    @property
    def size(self) -> int:
        return 4 * len(self.token_ids)

    @property
    def plain(self) -> int:
        return len(self.token_ids)

    def digest_at(self, count: int) -> str | None:
        if not 0 <= count <= len(self.token_ids):
            return None
        return _digest(dumps(self.token_ids[:count]))

    def with_answer(self, said: AnswerChoice) -> PromptPrefix | None:
        if said.token_ids is None:
            return None
        whole = [*self.token_ids, *said.token_ids]
        return PromptPrefix(len(whole), _digest(dumps(whole)))


def prompt_of(body: Json) -> Prompt | None:
    """What a request asks about; None for what cannot be compared with another prompt."""
    messages = body.get("messages")
    if isinstance(messages, list):
        return _chat(messages)
    prompt = body.get("prompt")
    if body.get("prompt_embeds") is not None or body.get("echo"):
        return None
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return TokenPrompt(prompt)
    return None


def _chat(messages: list[Any]) -> ChatPrompt:
    chain, size, has_media = [CHAT], 0, False
    reasoned = last_answer = 0
    for number, message in enumerate(messages, 1):
        text = _plain_text(message)
        content = canonical(message) if text is None else _dump(message)
        size += len(content)
        chain.append(_chained(chain[-1], content))
        if text is not None:
            reasoned = reasoned or (number if contains_think_mark(text) else 0)
        elif isinstance(message, dict):
            has_media = has_media or _has_media(message)
            reasoned = reasoned or (number if has_reasoning(message) else 0)
        if isinstance(message, dict) and message.get("role") == "assistant":
            last_answer = number
    plain = reasoned - 1 if reasoned else len(messages)
    return ChatPrompt(tuple(chain), size, plain, has_media, last_answer)


def _plain_text(message: object) -> str | None:
    """Of a message that is nothing but text, as nearly all are: then it is canonical as it is."""
    if type(message) is not dict or len(message) != len(PLAIN):
        return None
    text = message.get("content")
    return text if text and type(text) is str and message.get("role") else None


def canonical(message: object) -> bytes:
    """A message as bytes, the same for what an engine answered and for what a client repeats."""
    if not isinstance(message, dict) or _plain_text(message) is not None:
        return _dump(message)
    kept = {
        name: value
        for name, value in message.items()
        if name not in REASONING_KEYS and value not in (None, "", [], {})
    }
    if "content" in kept:
        kept["content"] = _content(kept["content"])
    calls = kept.get("tool_calls")
    if isinstance(calls, list):
        kept["tool_calls"] = [_call(call) for call in calls]
    return _dump(kept)


def _content(content: object) -> object:
    """A single part of text is the same as the text."""
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):
        part = content[0]
        if part.keys() == {"type", "text"} and part["type"] == "text":
            return part["text"]
    return content


def _call(call: object) -> object:
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


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).hexdigest()


# Of no message at all.
CHAT = _digest(b"chat")
