"""Decode first: what a decoder that was asked with `cache_hit_threshold` has answered.

An engine that knows the field (vLLM RFC #24256) answers, or rejects at once with the finish reason
"cache_threshold"; then the request takes another way, and the client hears nothing of it. An engine
that does not know the field just answers, after a whole prefill: that is found out, and such an
engine is not asked for long prompts again.
"""

from __future__ import annotations

from router.conversations.said import (
    Json,
    cached_tokens_of,
    events_in,
    parsed,
    prompt_tokens_of,
)
from router.flows.trial import is_rejection
from router.upstream.answer import Answer
from router.upstream.sse import end_of_last_event

NEEDLE = b'"cache_threshold"'


async def is_rejected(answer: Answer) -> bool:
    """Reads as much of the answer as that takes, and leaves it in place. Raises UpstreamError."""
    if answer.is_event_stream:
        held = await answer.until(lambda block: _verdict(block) is not None)
        return bool(_verdict(held))
    held = await answer.until(lambda _: False)
    content = parsed(held) if NEEDLE in held else None
    return content is not None and is_rejection(content)


async def cached_share(answer: Answer) -> float | None:
    """How much of the prompt came from the decoder's cache, where its usage tells."""
    if answer.is_event_stream:
        return None
    content = parsed(await answer.until(lambda _: False))
    if content is None:
        return None
    cached, total = cached_tokens_of(content), prompt_tokens_of(content)
    return cached / total if cached is not None and total else None


def _verdict(block: bytes) -> bool | None:
    """True when the events so far reject, False when they answer, None when they do neither."""
    for event in events_in(block[: end_of_last_event(block)]):
        if is_rejection(event):
            return True
        if _says_something(event):
            return False
    return None


def _says_something(event: Json) -> bool:
    """Whether an event is part of an answer: anything but a role alone."""
    if "error" in event:
        return True
    choices = event.get("choices")
    if not isinstance(choices, list):
        return False
    return any(isinstance(choice, dict) and _is_answer(choice) for choice in choices)


def _is_answer(choice: Json) -> bool:
    if choice.get("finish_reason") or choice.get("text"):
        return True
    delta = choice.get("delta")
    return isinstance(delta, dict) and any(value for name, value in delta.items() if name != "role")
