"""The plan of a request: a value that pure functions make and `strategies` carries out.

The plan names the strategy (see `strategies`), the engines in order of preference, and whether the
decode engine is asked first if its cache holds enough of the prompt to answer alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import islice

from msgspec import Struct
from msgspec.structs import replace

from router.conversations.reuse import TurnReuse
from router.fleet.engine import DECODE, Engine
from router.proxy.first_token import asks_one_token, can_hand_over, renders_alike
from router.proxy.request import PASSED, THRESHOLD, Request
from router.proxy.request_limits import RequestLimits
from router.routing.policy import in_turn
from router.routing.prompt_chunks import estimate_tokens
from router.routing.route import Route

# Up to this size of a request, an unwanted prefill costs a decode engine little.
MAX_SHORT_BODY_BYTES = 4096
# Reasons why one decode engine answers: its cache lacks little of the prompt; it is also the only
# prefill engine; the prompt is embeddings that engines cannot share.
SHORT_PROMPT = "short"
SAME_ENGINE = "same_engine"
PROMPT_EMBEDS = "prompt_embeds"
# Reason why one prefill engine answers: the client wants only the token that it samples anyway.
ONE_TOKEN_ANSWER = "one_token"


class Mode(StrEnum):
    """The values appear in traces."""

    DECODE_ONLY = "alone"
    PULL = "pull"
    PUSH = "push"


DECODE_ONLY, PULL, PUSH = Mode


class Plan(Struct, frozen=True):
    """How the router answers one request."""

    flow: str
    """The name of the plan in the access log and metrics."""
    mode: Mode
    route: Route
    decode_only_reason: str = ""
    """The metric label for the reason why one engine does all the work."""
    threshold: float = 0.0
    """Above 0: a decode engine with this share of the prompt in its cache answers alone. The first
    decode engine is asked first, and may reject the request."""
    hedged_decoders: Sequence[Engine] = ()
    """Decode engines that are asked at once with the threshold, instead of the first one."""
    skips_threshold: bool = False
    """A threshold applies, but the decode engine is not known to support it."""
    reuse: TurnReuse | None = None
    """For a turn of a conversation: what the request may use of the last turn's KV."""


def make_plan(
    request: Request, route: Route, reuse: TurnReuse | None, limits: RequestLimits
) -> Plan:
    """Return the plan of a request that may go to the engines of `route`."""
    if request.decode_only_reason == PASSED:
        if not route.decoders:  # a model that only prefill engines serve
            route = replace(route, decoders=route.prefillers, prefillers=())
        return Plan(PASSED, DECODE_ONLY, route, PASSED)
    if request.decode_only_reason:
        return Plan("decode_only", DECODE_ONLY, route, request.decode_only_reason)
    if route.prefillers and route.decoders and route.prefillers[0] is route.decoders[0]:
        # The engine plays both roles, and no engine loads KV from itself.
        others = [engine for engine in route.prefillers if engine is not route.decoders[0]]
        if not others:
            return Plan("decode_only", DECODE_ONLY, route, SAME_ENGINE, reuse=reuse)
        route = replace(route, prefillers=others)
    if PROMPT_EMBEDS in request.body and _cannot_share_embeds(request, route):
        return Plan("decode_only", DECODE_ONLY, route, PROMPT_EMBEDS, reuse=reuse)
    if _is_one_token(request, route, limits):
        route = replace(route, decoders=route.prefillers, prefillers=())
        return Plan("prefill_only", DECODE_ONLY, route, ONE_TOKEN_ANSWER)
    if limits.min_remote_prefill_tokens and _is_short(request, route, reuse, limits):
        name = "turn" if request.names_conversation else "decode_only"
        return Plan(name, DECODE_ONLY, route, SHORT_PROMPT, reuse=reuse)
    mode = choose_mode(route, limits.transfer_mode)
    flow: str = mode
    if request.names_conversation:
        flow = "turn"
    elif request.threshold:
        flow = "decode_first"
    threshold = request.threshold
    if not threshold and reuse is not None:
        threshold = _turn_threshold(request, reuse, limits)
    if threshold and (several := _choose_hedged_decoders(request, route, reuse, limits)):
        return Plan(flow, mode, route, threshold=threshold, hedged_decoders=several, reuse=reuse)
    if threshold and not (route.decoders and may_reject(request, route.decoders[0])):
        return Plan(flow, mode, route, skips_threshold=True, reuse=reuse)
    return Plan(flow, mode, route, threshold=threshold, reuse=reuse)


def _cannot_share_embeds(request: Request, route: Route) -> bool:
    """Return True if two engines cannot share a prompt of embeddings.

    Engines that verify prefixes share KV only for token ids, which embeddings do not have.
    """
    body = request.body
    if not body.get(PROMPT_EMBEDS) or "messages" in body:  # engines ignore the field
        return False
    first = (*route.prefillers[:1], *route.decoders[:1])
    return any(engine.capabilities.verifies_prefix for engine in first)


def _is_one_token(request: Request, route: Route, limits: RequestLimits) -> bool:
    """Return True if the client wants one token, which the prefill engine samples in any case and
    renders as the decode engine would."""
    if limits.first_token != "auto" or not route.prefillers or not route.decoders:
        return False
    prefiller = route.prefillers[0]
    return (
        prefiller.capabilities.supports_hand_over
        and request.turn is None
        and asks_one_token(request.body)
        and can_hand_over(request.body)
        and renders_alike(prefiller, route.decoders[0].capabilities.render_hashes)
    )


def _is_short(
    request: Request, route: Route, reuse: TurnReuse | None, limits: RequestLimits
) -> bool:
    """Return True if the decode engine has so much of the prompt in its cache that it computes the
    rest sooner than a transfer would take (min_remote_prefill_tokens)."""
    if not route.decoders:
        return False
    decoder, notes = route.decoders[0], route.decode_feedback
    tokens = estimate_tokens(request.body)
    place = route.place(decoder, DECODE)
    cached = 0 if notes is None else notes.expected_tokens(place.name)
    if reuse is not None and reuse.decoder is decoder:
        cached = max(cached, int(reuse.cached_share * tokens))
    return tokens - cached < limits.min_remote_prefill_tokens


def choose_mode(route: Route, transfer_mode: str) -> Mode:
    """Return PULL or PUSH by the setting transfer_mode; `auto` means push where both engines
    support it."""
    if transfer_mode == "pull" or not route.prefillers or not route.decoders:
        return PULL
    if transfer_mode == "auto":
        both = (
            route.prefillers[0].capabilities.supports_push
            and route.decoders[0].capabilities.supports_push
        )
        return PUSH if both else PULL
    return PUSH


def _turn_threshold(request: Request, reuse: TurnReuse, limits: RequestLimits) -> float:
    """Return the threshold for a turn whose decode engine is expected to have most of the prompt
    in its cache (decode_first_turns), else 0."""
    share = limits.decode_first_turns
    if not share or reuse.decoder is None or THRESHOLD in request.body:
        return 0
    holds_it = reuse.cached_share >= share
    return share if holds_it and reuse.decoder.capabilities.supports_threshold else 0


def _choose_hedged_decoders(
    request: Request, route: Route, reuse: TurnReuse | None, limits: RequestLimits
) -> Sequence[Engine]:
    """Return the decode engines for hedged legs, or () if the request is not hedged.

    Only streams are hedged: an answer that is not streamed shows the engine's acceptance when all
    of it is computed. Only engines that are known to support the threshold take part, because any
    other engine would compute the prompt. If a decode engine has the last turn, only that one is
    asked.
    """
    if limits.hedged_decoders < 2 or request.exact_stream or request.body.get("stream") is not True:
        return ()
    if reuse is not None and reuse.decoder is not None and reuse.cached_share:
        return ()
    others = in_turn(route.all_decoders, request.number)
    order = (*route.decoders, *(one for one in others if one not in route.decoders))
    able = (one for one in order if one.capabilities.supports_threshold)
    found = tuple(islice(able, limits.hedged_decoders))
    return found if len(found) > 1 else ()


def may_reject(request: Request, decoder: Engine) -> bool:
    """Return True if the decode engine may support the threshold, or if the request is so short
    that a prefill there costs little."""
    knows = decoder.capabilities.supports_threshold
    return knows is not False or len(request.exchange.body) <= MAX_SHORT_BODY_BYTES
