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
from router.fleet.engine import DECODE, PREFILL, Engine, EngineRole
from router.proxy.first_token import asks_one_token, can_hand_over, renders_alike
from router.proxy.kv_protocols import protocol_of
from router.proxy.ranks import find_place
from router.proxy.request import PASSED, THRESHOLD, Request
from router.proxy.request_limits import RequestLimits
from router.routing.local_prefill import PromptPlace, choose_local_prefill
from router.routing.policy import in_turn
from router.routing.prompt_chunks import has_media
from router.routing.route import Route

# Up to this size of a request, an unwanted prefill costs a decode engine little.
MAX_SHORT_BODY_BYTES = 4096
# Reasons why one decode engine answers, beside those of local_prefill: its cache lacks little of
# the prompt; it is also the only prefill engine; it costs least for both legs; the prompt is
# embeddings that engines cannot share.
SHORT_PROMPT = "short"
SAME_ENGINE = "same_engine"
CHEAPEST = "cheapest"
PROMPT_EMBEDS = "prompt_embeds"
# Reason why one prefill engine answers: the client wants only the token that it samples anyway.
ONE_TOKEN_ANSWER = "one_token"
# Requests with one of these fields are not judged by the size of their prompt.
NOT_BY_SIZE = frozenset((THRESHOLD, PROMPT_EMBEDS))


class Mode(StrEnum):
    """The values appear in traces."""

    DECODE_ONLY = "alone"
    PULL = "pull"
    PUSH = "push"
    TRANSFER = "transfer"


DECODE_ONLY, PULL, PUSH, TRANSFER = Mode


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
    request: Request,
    route: Route,
    reuse: TurnReuse | None,
    limits: RequestLimits,
    is_placed: bool = False,
) -> Plan:
    """Return the plan of a request that may go to the engines of `route`. `is_placed`: it has a
    slot at the first ones."""
    if request.decode_only_reason == PASSED:
        if not route.decoders:  # a model that only prefill engines serve
            route = replace(route, decoders=route.prefillers, prefillers=())
        return Plan(PASSED, DECODE_ONLY, route, PASSED)
    protocol = protocol_of(route.prefillers[0]) if route.prefillers else None
    if protocol is not None and protocol.plans(request):
        return Plan(protocol.name, TRANSFER, route)
    if request.decode_only_reason:
        return Plan("decode_only", DECODE_ONLY, route, request.decode_only_reason)
    name = "turn" if request.names_conversation else "decode_only"
    if route.prefillers and route.decoders and route.prefillers[0] is route.decoders[0]:
        # The engine plays both roles, and no engine loads KV from itself.
        if route.is_free and not request.threshold and THRESHOLD not in request.body:
            return Plan(name, DECODE_ONLY, route, CHEAPEST, reuse=reuse)
        others = [engine for engine in route.prefillers if engine is not route.decoders[0]]
        if not others:
            return Plan("decode_only", DECODE_ONLY, route, SAME_ENGINE, reuse=reuse)
        route = replace(route, prefillers=others)
    if PROMPT_EMBEDS in request.body and _cannot_share_embeds(request, route):
        return Plan("decode_only", DECODE_ONLY, route, PROMPT_EMBEDS, reuse=reuse)
    if _is_one_token(request, route, limits):
        route = replace(route, decoders=route.prefillers, prefillers=())
        return Plan("prefill_only", DECODE_ONLY, route, ONE_TOKEN_ANSWER)
    local = find_local_prefill(request, route, reuse, limits, is_placed)
    if local is not None:
        decoder, reason = local
        others = [engine for engine in route.decoders if engine is not decoder]
        route = replace(route, decoders=[decoder, *others])
        return Plan(name, DECODE_ONLY, route, reason, reuse=reuse)
    mode = choose_mode(route, limits.transfer_mode)
    flow: str = mode
    if request.turn is not None and request.names_conversation:
        flow = "turn"
    elif request.threshold:
        flow = "decode_first"
    threshold = request.threshold
    if not threshold and reuse is not None:
        threshold = _turn_threshold(request, route, reuse, limits)
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


def find_local_prefill(
    request: Request,
    route: Route,
    reuse: TurnReuse | None,
    limits: RequestLimits,
    is_placed: bool = False,
) -> tuple[Engine, str] | None:
    """Return the decode engine that computes the prompt itself, and the reason: it lacks few tokens
    (min_remote_prefill_tokens), it is sooner than a prefill engine and keeps the target_itl, or it
    has not measured yet whether it would.

    A turn stays at the decode engine that has the last turn's KV, a request at its slot, and all
    requests at their first engine if the policy goes by sessions. Other requests go to the decode
    engine of the route with the least work. A cache_hit_threshold in the request takes precedence;
    the tokens of embeddings are unknown, and so is the time to encode media.
    """
    least, target = limits.min_remote_prefill_tokens, limits.target_itl
    candidates: Sequence[Engine] = ()
    if target and route.prefillers and not request.is_several and not route.is_free:
        is_bound = is_placed or limits.decode_policy == "session"
        is_bound = is_bound or (reuse is not None and _has_turn_first(route, reuse))
        found = route.decoders[:1] if is_bound else route.decoders
        candidates = [one for one in found if one.capabilities.max_step_tokens]
        if candidates:  # a failing engine looks idle
            candidates = [one for one in candidates if not one.failed_recently] or candidates
            candidates = () if has_media(request.body) else candidates
    if not (least or candidates) or not route.decoders or not NOT_BY_SIZE.isdisjoint(request.body):
        return None
    if least and place_of_prompt(request, route, reuse, route.decoders[0]).uncached < least:
        return route.decoders[0], SHORT_PROMPT
    if not candidates or (reuse is not None and _turn_threshold(request, route, reuse, limits)):
        return None  # with a threshold, the decode engine itself judges what its cache lacks
    decoders = [place_of_prompt(request, route, reuse, engine) for engine in candidates]
    prefiller = place_of_prompt(request, route, reuse, route.prefillers[0], PREFILL)
    tokens, slowness = request.prompt_tokens, route.slowness
    return choose_local_prefill(decoders, prefiller, tokens, target, slowness)


def place_of_prompt(
    request: Request,
    route: Route,
    reuse: TurnReuse | None,
    engine: Engine,
    role: EngineRole = DECODE,
) -> PromptPlace:
    """Return where an engine would compute the prompt in this role, and what it lacks of it."""
    place, total = find_place(request, route, reuse, engine, role), max(1, request.prompt_tokens)
    notes = route.decode_feedback if role is DECODE else route.prefill_feedback
    cached = 0 if notes is None else notes.expected_tokens(place.name)
    # The decode engine of the last turn has its KV, and a prefill engine would pull it.
    if reuse is not None and (reuse.decoder is engine if role is DECODE else reuse.entry):
        cached = max(cached, int(reuse.cached_share * total))
    return PromptPlace(engine, place, total - cached)


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


def _turn_threshold(
    request: Request, route: Route, reuse: TurnReuse, limits: RequestLimits
) -> float:
    """Return the threshold for a turn whose decode engine is expected to have most of the prompt
    in its cache (decode_first_turns), else 0."""
    share = limits.decode_first_turns
    if not share or not _has_turn_first(route, reuse) or THRESHOLD in request.body:
        return 0
    holds_it = reuse.cached_share >= share
    return share if holds_it and route.decoders[0].capabilities.supports_threshold else 0


def _has_turn_first(route: Route, reuse: TurnReuse) -> bool:
    """Return True if the first decode engine has the last turn's KV."""
    home = reuse.decoder
    return home is not None and len(route.decoders) > 0 and route.decoders[0] is home


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
