"""Prompts that count as queued at the engine that computes them as load beside its answers."""

from __future__ import annotations

from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Collection

from router.conversations.reuse import TurnReuse
from router.fleet.engine import PREFILL, Engine, Place
from router.proxy.plan import place_of_prompt
from router.proxy.request import AS_SENT, Request
from router.routing.costs import PlaceLoad
from router.routing.local_prefill import is_trial
from router.routing.route import Route


class QueuedPrefill:
    """A prompt that counts as queued at its decode engine from now on until `end`."""

    __slots__ = ("_places", "_seconds", "_timer", "_tokens")

    def __init__(
        self, places: Collection[Place], seconds: float, uncached: int, work: float = 0.0
    ) -> None:
        """`places` are the engine, and its data-parallel rank if one is chosen. `work`: the seconds
        that the prompt would take without answers beside it."""
        self._places, self._seconds, self._tokens = places, seconds, uncached
        self._timer: TimerHandle | None = None
        for place in places:
            place.add_local_prefill(self._seconds, uncached)
            place.offered_prefill_s += work

    def end_in_time(self, loop: AbstractEventLoop) -> None:
        """End when the prompt should be computed, because its answer will not show it: only a
        stream shows its first token."""
        seconds = min(place.local_prefill_s for place in self._places)
        self._timer = loop.call_later(seconds, self.end)

    def end(self) -> None:
        """The prompt is computed, or will not be."""
        if self._timer is not None:
            self._timer.cancel()
        for place in self._places:
            place.add_local_prefill(-self._seconds, -self._tokens)
        self._seconds, self._tokens = 0.0, 0


def queue_local_prefill(
    request: Request, route: Route, reuse: TurnReuse | None, decoder: Engine, place: Place
) -> QueuedPrefill | None:
    """Count the prompt as queued at a decode engine, and its rank, that computes it.

    Return None if the engine does not report its steps, or loads the KV that the client names.
    """
    if not decoder.capabilities.max_step_tokens or request.decode_only_reason in AS_SENT:
        return None
    load = PlaceLoad.of(decoder, place, route.usual_model)
    total = max(1, request.prompt_tokens)
    uncached = max(1, place_of_prompt(request, route, reuse, decoder).uncached)
    if load is None:
        if not is_trial(decoder, place, uncached):
            return None  # it shows little of the time of its steps
        decoder.capabilities.trial_prefills += 1
        return QueuedPrefill({decoder, place}, 0.0, uncached)
    queued = _queue(load, {decoder, place}, uncached, total)
    if request.exact_stream or request.body.get("stream") is not True:
        queued.end_in_time(request.exchange.loop)
    return queued


def queue_prefill(
    request: Request, route: Route, engine: Engine, place: Place, uncached: int, read_share: float
) -> QueuedPrefill:
    """Count the prompt of a prefill leg as queued at an engine of both roles, and at its rank.
    `read_share`: the part of the prompt that the engine reads from another one."""
    load = PlaceLoad.of(engine, place, route.usual_model)
    uncached = max(1, min(uncached, int((1 - read_share) * request.tokens)))
    if load is None:
        seconds = uncached * place.prefill_rate.token_seconds
        return QueuedPrefill({engine, place}, seconds, uncached, seconds)
    if engine.preferred_role is PREFILL and not load.contexts:
        load = load.without_step_limit()
    return _queue(load, {engine, place}, uncached, max(uncached, request.tokens))


def _queue(load: PlaceLoad, places: Collection[Place], uncached: int, total: int) -> QueuedPrefill:
    work = load.model.prefill_seconds(uncached, total, load.max_step_tokens)
    return QueuedPrefill(places, load.prefill_seconds(uncached, total), uncached, work)
