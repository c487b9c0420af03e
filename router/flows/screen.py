"""Answers with status 200 that are none: read before anything of them reaches the client.

An engine that is being stopped (vLLM: on SIGTERM at once, or when its time to drain is over) ends
what it has and what still comes to it with the finish reason "abort". As long as the client has
none of the text, another engine can answer.

Decode first: what a decoder that was asked with `cache_hit_threshold` has answered. An engine that
knows the field (vLLM RFC #24256) answers, or rejects at once with the finish reason
"cache_threshold"; then the request takes another way, and the client hears nothing of it. An engine
that does not know the field just answers, after a whole prefill: that is found out, and such an
engine is not asked for long prompts again.
"""

from __future__ import annotations

from collections.abc import Callable

from router.conversations.said import (
    Json,
    cached_tokens_of,
    events_in,
    parsed,
    prompt_tokens_of,
)
from router.flows.trial import is_rejection
from router.upstream.answer import Answer
from router.upstream.errors import BrokenAnswerError
from router.upstream.sse import BOUNDARIES, end_of_last_event

NEEDLE = b'"cache_threshold"'
ABORT = "abort"
ABORTED = b'"abort"'
# As vLLM writes it into a whole answer: a longer needle is found at half the price.
CUT_OFF = b'"finish_reason":"abort"'
# Engines begin a chat's stream with an event for each choice that has a role and no text.
ROLE, END, MOST_CHOICES = b'"role"', b"\n\n", 128


async def tells_something(answer: Answer) -> None:
    """Returns when it does, or has ended. Raises UpstreamError."""
    await answer.until(lambda block: not tells_nothing(opening(block)))


def ends_at_once(block: bytes) -> bool:
    """Whether a stream that opens so was cut off by an engine that is being stopped, and has no
    text that a client could have seen."""
    return first_says(block, ABORTED, has_aborted)


def first_says(block: bytes, needle: bytes, is_none: Callable[[Json], bool]) -> bool:
    """Whether a stream that opens so says that there is no answer, which has a `needle`."""
    return block.find(needle) >= 0 and bool(_verdict(block, is_none))


def is_cut_off(raw: bytes) -> bool:
    """The same of a whole answer that is not streamed. Each of them is asked: one look."""
    content = parsed(raw) if raw.find(CUT_OFF) >= 0 else None
    return content is not None and has_aborted(content)


def has_aborted(content: Json) -> bool:
    """Without a reason of its own: a rejection has one."""
    choices = content.get("choices")
    return isinstance(choices, list) and any(
        isinstance(choice, dict)
        and choice.get("finish_reason") == ABORT
        and choice.get("stop_reason") is None
        for choice in choices
    )


def tells_nothing(block: bytes) -> bool:
    """What a stream opens with is no whole event, or roles alone: where there are more events than
    roles, one of them is something else."""
    events = block.count(END) or max(map(block.count, BOUNDARIES))
    if events > min(MOST_CHOICES, block.count(ROLE)):
        return False
    return not any(map(_says_something, events_in(block[: end_of_last_event(block)])))


def opening(block: bytes) -> bytes:
    """The first two events, where the second one says something or nothing comes after: of a burst
    nobody looks at the rest."""
    first = block.find(END)
    second = block.find(END, first + len(END)) if first > 0 else -1
    if second < 0 or block.startswith(b":") or block.find(ROLE, first, second) >= 0:
        return block
    return block[: second + len(END)]


async def is_rejected(answer: Answer) -> bool:
    """Reads as much of the answer as that takes, and leaves it in place. Raises UpstreamError."""
    if answer.is_event_stream:
        held = await answer.until(lambda block: _verdict(block, is_rejection) is not None)
        return bool(_verdict(held, is_rejection))
    held = await answer.until(lambda _: False)
    content = parsed(held) if NEEDLE in held else None
    return content is not None and is_rejection(content)


async def require_beginning(answer: Answer) -> None:
    """Of a stream for which others are left. Raises UpstreamError of one that says nothing, or that
    it has failed."""
    held = await answer.until(lambda block: _verdict(block, _is_error) is not None)
    if not answer.is_event_stream or _verdict(held, _is_error) is not False:
        raise BrokenAnswerError("a stream that does not begin with an answer")


def _is_error(event: Json) -> bool:
    return "error" in event


async def cached_share(answer: Answer) -> float | None:
    """How much of the prompt came from the decoder's cache, where its usage tells."""
    if answer.is_event_stream:
        return None
    content = parsed(await answer.until(lambda _: False))
    if content is None:
        return None
    cached, total = cached_tokens_of(content), prompt_tokens_of(content)
    return cached / total if cached is not None and total else None


def _verdict(block: bytes, is_none: Callable[[Json], bool]) -> bool | None:
    """True when one of the events so far says that there is no answer, False when they answer, None
    when they do neither."""
    for event in events_in(block[: end_of_last_event(block)]):
        if is_none(event):
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
