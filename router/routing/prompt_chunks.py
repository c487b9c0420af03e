"""A prompt as chained hashes of its chunks of about 256 tokens, and an estimate of its tokens.

Two prompts share their first n hashes if their first n chunks are equal, in every process. What a
template writes around messages does not count; the content it renders (tools, roles, calls) does.
The hashes are hints for a choice, never a proof: a CRC of each chunk distinguishes chunks well
enough, at a quarter of the cost of a digest. Any JSON is accepted; a body without a prompt has no
chunks.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Any

import orjson

from router.common.exact_json import dumps

Body = dict[str, Any]

TOKENS_PER_CHUNK = 256
BYTES_PER_TOKEN = 4
CHUNK_BYTES = TOKENS_PER_CHUNK * BYTES_PER_TOKEN
# With 256, the long chats of coding agents look mostly uncached: their engine seems to be busy.
MAX_CHUNKS = 512
LIMIT_BYTES = MAX_CHUNKS * CHUNK_BYTES
# What a template writes around a message.
MESSAGE_TOKENS = 4
# Of a long encoded medium or name, this many characters of each end are hashed.
END_CHARS = 256
# Fields beside the messages that a chat template renders.
RENDERED = ("tools", "documents", "chat_template", "chat_template_kwargs")
CALLS = ("tool_calls", "tool_call_id")
MEDIA = ("image_url", "input_audio", "video_url", "audio_url", "file")
# The assumed size of an image: its encoded size is little evidence of its tokens.
MEDIA_BYTES = 4096
MIXER = 0x9E3779B97F4A7C15
MASK = 2**64 - 1
# The most values of nested JSON that are measured.
MAX_VALUES = 10_000


def hash_chunks(body: Body) -> tuple[int, ...]:
    """Return the hashes of the whole chunks: an extended prompt begins with the same hashes."""
    ids = _token_ids(body)
    content = _pack(ids) if ids is not None else _content(body)
    size = 8 * TOKENS_PER_CHUNK if ids is not None else CHUNK_BYTES
    if len(content) < size:
        return ()
    chained = zlib.crc32(_scope(body))
    found: list[int] = []
    for end in range(size, len(content) + 1, size):
        chained = (chained ^ zlib.crc32(content[end - size : end])) * MIXER & MASK
        found.append(chained)
    return tuple(found)


def describe_part(body: Body, start: int, end: int) -> str:
    """Describe the part of the prompt that contains the chunks from `start` to `end`, such as "the
    system prompt, after 768 to 1,024 of about 12,272 tokens"."""
    size, names = 0, list[str]()
    for name, text in _named_parts(body):
        size += len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        if size > start * CHUNK_BYTES:
            names.append(name)
        if size >= end * CHUNK_BYTES:
            break
    where = " to ".join(dict.fromkeys((names[0], names[-1]))) if names else "the prompt"
    known = f"{start * TOKENS_PER_CHUNK:,} to {end * TOKENS_PER_CHUNK:,}"
    return f"{where}, after {known} of about {estimate_tokens(body):,} tokens"


def _named_parts(body: Body) -> Iterator[tuple[str, str]]:
    """Yield the tools and the messages as `_content` has them."""
    messages = body.get("messages")
    if isinstance(messages, list):
        yield "the tools", "".join(_render(body, []))
        for number, one in enumerate(messages, 1):
            if not isinstance(one, dict):  # of which there may be millions
                continue
            is_system = number == 1 and one.get("role") in ("system", "developer")
            name = "the system prompt" if is_system else f"message {number} of {len(messages)}"
            yield name, "".join(_render({}, [one]))


def adapter_chunk(name: str) -> int:
    """Return a chunk that represents a LoRA adapter: engines that have loaded it hold the chunk."""
    text = name[:END_CHARS].encode("utf-8", "surrogatepass")
    return (zlib.crc32(text) | 1 << 32) * MIXER & MASK


def estimate_tokens(body: Body) -> int:
    """Return the number of token ids, or else an estimate of four bytes per token."""
    messages, tokens = body.get("messages"), _prompt_tokens(_prompt_of(body))
    if not isinstance(messages, list):
        return tokens
    size = sum(_size_of(body.get(name)) for name in RENDERED)
    for message in messages:
        if isinstance(message, dict):
            content = message.get("content") if len(message) <= 2 else message
            size += _size_of(content if isinstance(content, str) else message)
    # The endpoint decides which field counts, and the other one is hardly ever there.
    return max(tokens, -(-size // BYTES_PER_TOKEN) + MESSAGE_TOKENS * len(messages))


def has_media(body: Body) -> bool:
    """Return True if a message has an image or another medium, which an engine encodes first."""
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") in MEDIA:
                return True
    return False


def _prompt_of(body: Body) -> object:
    """Return the prompt of a completion, or the token ids of /inference/v1/generate."""
    prompt = body.get("prompt")
    return body.get("token_ids") if prompt is None else prompt


def _prompt_tokens(prompt: object) -> int:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
        prompt = prompt[0]
    # Engines take 1.0, true and "1" for token ids, too, if the first one is a number.
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return len(prompt)
    return -(-_size_of(prompt) // BYTES_PER_TOKEN)


def _token_ids(body: Body) -> list[int] | None:
    """Return the token ids that are hashed, or None for a prompt of text."""
    prompt = _prompt_of(body)
    if isinstance(body.get("messages"), list) or not isinstance(prompt, list) or not prompt:
        return None
    if len(prompt) == 1 and isinstance(prompt[0], list):
        prompt = prompt[0]
    prompt = prompt[: MAX_CHUNKS * TOKENS_PER_CHUNK]
    return prompt if prompt and set(map(type, prompt)) == {int} else None


def _pack(ids: list[int]) -> bytes:
    try:
        return struct.pack(f"<{len(ids)}q", *ids)
    except struct.error:  # no token id is that large
        return b""


def _scope(body: Body) -> bytes:
    """Return what distinguishes KV cache entries besides the prompt: model and cache salt."""
    text = f"{_first_chars(body.get('model'))}\0{_first_chars(body.get('cache_salt'))}"
    return text.encode("utf-8", "surrogatepass")


def _first_chars(value: object) -> str:
    return value[:END_CHARS] if isinstance(value, str) else ""


def _content(body: Body) -> bytes:
    """Return the beginning of what a template would render, as far as it is hashed."""
    messages = body.get("messages")
    parts = _render(body, messages) if isinstance(messages, list) else [_prompt(body)]
    return "".join(parts)[:LIMIT_BYTES].encode("utf-8", "surrogatepass")[:LIMIT_BYTES]


def _prompt(body: Body) -> str:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    return prompt if isinstance(prompt, str) else ""


def _render(body: Body, messages: list[Any]) -> list[str]:
    tools = body.get("tools")
    parts = [_dump(tools)] if tools else []
    size = sum(map(len, parts))
    for message in messages:
        if size >= LIMIT_BYTES:
            break
        if not isinstance(message, dict):
            continue
        role, content = message.get("role"), message.get("content")
        text = content if isinstance(content, str) else _text_of_parts(content)
        parts += ("\0", role if isinstance(role, str) else "", "\0", text)
        size += len(text) + 2
        if len(message) > 2:
            parts += [_dump(message[name]) for name in CALLS if message.get(name)]
    return parts


def _text_of_parts(content: object) -> str:
    return "".join(map(_part_text, content)) if isinstance(content, list) else ""


def _part_text(part: object) -> str:
    """Return a part's text, or the ends and the length of its medium, which may have megabytes."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        return ""
    text = part.get("text")
    if isinstance(text, str):
        return text
    media = _dump(part)
    return media[:END_CHARS] + f"\0{len(media)}\0" + media[-END_CHARS:]


def _dump(value: object) -> str:
    try:
        return dumps(value).decode()
    except orjson.JSONEncodeError:
        return ""


def _size_of(value: object) -> int:
    """Return the bytes of all texts in it. Not recursive, since JSON may be nested deeply."""
    size, waiting = 0, [value]
    for _ in range(MAX_VALUES):
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
