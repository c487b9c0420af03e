"""A prompt as chained hashes, one for each TOKENS of it or so, and how many tokens it has.

Two prompts share the n first hashes if their first n chunks are the same, in every process. What a
template puts before and between messages doesn't count; what it renders (tools, roles, calls) does.
These are hints for a choice, never a proof (a CRC of each chunk tells it from another well enough,
at a quarter of a digest's price), and total: any JSON has chunks, if only none.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

import orjson

from router.common.exact_json import dumps

Body = dict[str, Any]

TOKENS = 256
BYTES_PER_TOKEN = 4
CHUNK_BYTES = TOKENS * BYTES_PER_TOKEN
MOST = 128
LIMIT = MOST * CHUNK_BYTES
MESSAGE_TOKENS = 4
"""What a template writes around a message."""
MEDIA_ENDS = 256
CALLS = ("tool_calls", "tool_call_id")
MEDIA = ("image_url", "input_audio", "video_url", "audio_url", "file")
MEDIA_BYTES = 4096
"""What an image counts as: its encoded size says little about its tokens."""
MIXER = 0x9E3779B97F4A7C15
MASK = 2**64 - 1
VALUES = 10_000
"""Of nested JSON, so many values are looked at."""


def chunks_of(body: Body) -> tuple[int, ...]:
    """Only whole chunks count, so a prompt's chunks are a beginning of its extension's."""
    ids = _token_ids(body)
    content = _packed(ids[: MOST * TOKENS]) if ids is not None else _content(body)
    size = 8 * TOKENS if ids is not None else CHUNK_BYTES
    if len(content) < size:
        return ()
    chained = zlib.crc32(_scope(body))
    found: list[int] = []
    for end in range(size, len(content) + 1, size):
        chained = (chained ^ zlib.crc32(content[end - size : end])) * MIXER & MASK
        found.append(chained)
    return tuple(found)


def tokens_of(body: Body) -> int:
    """Exact for token ids; a token is taken for four bytes otherwise."""
    ids = _token_ids(body)
    if ids is not None:
        return len(ids)
    messages = body.get("messages")
    if not isinstance(messages, list):
        return -(-_size_of(body.get("prompt")) // BYTES_PER_TOKEN)
    size = _size_of(body.get("tools"))
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else message
        size += _size_of(content if isinstance(content, str) else message)
    return -(-size // BYTES_PER_TOKEN) + MESSAGE_TOKENS * len(messages)


def _token_ids(body: Body) -> list[int] | None:
    prompt = body.get("prompt")
    if isinstance(body.get("messages"), list) or not isinstance(prompt, list) or not prompt:
        return None
    if len(prompt) == 1 and isinstance(prompt[0], list):
        prompt = prompt[0]
    return prompt if prompt and set(map(type, prompt)) == {int} else None


def _packed(ids: list[int]) -> bytes:
    try:
        return struct.pack(f"<{len(ids)}q", *ids)
    except struct.error:  # No token id is that large.
        return b""


def _scope(body: Body) -> bytes:
    """What else tells one KV cache entry from another."""
    text = f"{_head(body.get('model'))}\0{_head(body.get('cache_salt'))}"
    return text.encode("utf-8", "surrogatepass")


def _head(value: object) -> str:
    return value[:MEDIA_ENDS] if isinstance(value, str) else ""


def _content(body: Body) -> bytes:
    """The beginning of what a template would render, as far as chunks are made of it."""
    messages = body.get("messages")
    parts = _rendered(body, messages) if isinstance(messages, list) else [_prompt(body)]
    return "".join(parts)[:LIMIT].encode("utf-8", "surrogatepass")[:LIMIT]


def _prompt(body: Body) -> str:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    return prompt if isinstance(prompt, str) else ""


def _rendered(body: Body, messages: list[Any]) -> list[str]:
    tools = body.get("tools")
    parts = [_dump(tools)] if tools else []
    size = sum(map(len, parts))
    for message in messages:
        if size >= LIMIT:
            break
        if not isinstance(message, dict):
            continue
        role, content = message.get("role"), message.get("content")
        text = content if isinstance(content, str) else _media(content)
        parts += ("\0", role if isinstance(role, str) else "", "\0", text)
        size += len(text) + 2
        if len(message) > 2:
            parts += [_dump(message[name]) for name in CALLS if message.get(name)]
    return parts


def _media(content: object) -> str:
    return "".join(map(_part_text, content)) if isinstance(content, list) else ""


def _part_text(part: object) -> str:
    """An image may have megabytes; its ends and its length tell it well enough from others."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        return ""
    text = part.get("text")
    if isinstance(text, str):
        return text
    media = _dump(part)
    return media[:MEDIA_ENDS] + f"\0{len(media)}\0" + media[-MEDIA_ENDS:]


def _dump(value: object) -> str:
    try:
        return dumps(value).decode()
    except orjson.JSONEncodeError:
        return ""


def _size_of(value: object) -> int:
    """The bytes of all texts in it; not recursive, because JSON may be nested deeply."""
    size, waiting = 0, [value]
    for _ in range(VALUES):
        if not waiting:
            break
        item = waiting.pop()
        if isinstance(item, str):
            size += len(item) if item.isascii() else len(item.encode("utf-8", "surrogatepass"))
        elif isinstance(item, list):
            waiting += item
        elif isinstance(item, dict):
            if item.get("type") in MEDIA:
                size += MEDIA_BYTES
            else:
                waiting += item.values()
    return size
