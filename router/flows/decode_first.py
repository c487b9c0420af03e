"""Decode first: a decoder whose cache holds enough of the prompt answers alone.

It is asked with `cache_hit_threshold` (vLLM RFC #24256). An engine that knows the field answers, or
rejects at once with the finish reason "cache_threshold"; then the request takes another way, and
the client hears nothing of it. An engine that does not know the field just answers, after a whole
prefill: that is found out, and such an engine is not asked for long prompts again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.conversations.said import (
    Json,
    cached_tokens_of,
    events_in,
    parsed,
    prompt_tokens_of,
)
from router.fleet.engine import Engine, Role
from router.flows import legs
from router.flows.errors import BadRequestError
from router.flows.gateway import Gateway
from router.flows.pull import pull
from router.flows.request import Request, write_body
from router.flows.steps import Deliver, decode, relay
from router.flows.trial import is_rejection, try_threshold
from router.upstream.answer import Answer
from router.upstream.sse import end_of_last_event

NEEDLE = b'"cache_threshold"'
# Bytes of a request whose prefill costs a decoder little, whether or not it was asked for.
SHORT = 4096


@dataclass(frozen=True, slots=True)
class Attempt:
    """What a decoder is asked first: `body` without the threshold, in this order."""

    threshold: float
    body: legs.Body
    decoders: Sequence[Engine]
    deliver: Deliver


def threshold_of(body: legs.Body, default: float) -> float:
    """The request's own threshold, else the default; 0 asks for nothing. Raises BadRequestError."""
    value = body.get(legs.THRESHOLD)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise BadRequestError("cache_hit_threshold must be a number from 0 to 1")
    return float(value)


async def decoder_or_both(request: Request, gateway: Gateway, threshold: float) -> None:
    """Decode first, and where that does not answer, pull with the same decoder."""
    gateway.require(Role.DECODE)
    decoders = gateway.in_turn(Role.DECODE)
    attempt = Attempt(threshold, request.body, decoders, relay)
    if not await decode_first(request, gateway, attempt):
        await pull(request, gateway, decoders)


async def decode_first(request: Request, gateway: Gateway, attempt: Attempt) -> bool:
    """True when a decoder has answered. Otherwise `request` is ready for another plan."""
    if not _may_try(attempt, len(request.exchange.body)):
        gateway.metrics.decode_first.add(("skipped",))
        _go_on(request)
        return False
    rejected = False

    async def screened(request: Request, gateway: Gateway, engine: Engine, answer: Answer) -> None:
        nonlocal rejected
        rejected = await _is_rejected(answer)
        if rejected:
            engine.learned.note_rejected()
            return
        if engine.learned.knows_threshold is None:
            share = None if answer.is_event_stream else await _cached_share(answer)
            if engine.learned.note_accepted(attempt.threshold, share):
                gateway.spawn(try_threshold(request, engine))
        await attempt.deliver(request, gateway, engine, answer)

    body = legs.with_threshold(attempt.body, attempt.threshold)
    await decode(request, gateway, write_body(body), attempt.decoders, screened)
    gateway.metrics.decode_first.add(("rejected" if rejected else "answered",))
    if rejected:
        request.attempt += 1
        _go_on(request)
    return not rejected


def _may_try(attempt: Attempt, size: int) -> bool:
    """The first decoder may refuse, or the prompt is short enough not to mind."""
    if not attempt.decoders:
        return False
    learned = attempt.decoders[0].learned
    learned.wanted = True
    return learned.knows_threshold is not False or size <= SHORT


def _go_on(request: Request) -> None:
    """From now on no engine may reject: after the prefill the decoder has it all."""
    if legs.THRESHOLD in request.body or request.attempt:
        request.body = legs.with_threshold(request.body, 0)


async def _is_rejected(answer: Answer) -> bool:
    """Reads as much of the answer as that takes, and leaves it in place."""
    if answer.is_event_stream:
        held = await answer.until(lambda block: _verdict(block) is not None)
        return bool(_verdict(held))
    held = await answer.until(lambda _: False)
    content = parsed(held) if NEEDLE in held else None
    return content is not None and is_rejection(content)


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


async def _cached_share(answer: Answer) -> float | None:
    """How much of the prompt came from the decoder's cache, where its usage tells."""
    content = parsed(await answer.until(lambda _: False))
    if content is None:
        return None
    cached, total = cached_tokens_of(content), prompt_tokens_of(content)
    return cached / total if cached is not None and total else None
