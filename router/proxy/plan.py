"""What is to be done about a request: a value, made by pure functions, carried out by `run`.

Pull asks a prefiller and then a decoder, which fetches the blocks that the prefiller keeps for it.
Push asks both at once, and the prefiller writes the blocks. Alone, a decoder does it all. Any of
them may begin with a question to the decoder, or to several at once: does its cache hold enough to
answer alone?
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import islice

from msgspec.structs import replace

from router.common.structs import FrozenStruct
from router.fleet.engine import Engine
from router.proxy.first_token import asks_one_token, can_hand_over, renders_alike
from router.proxy.request import PASSED, THRESHOLD, Request
from router.proxy.request_limits import RequestLimits
from router.proxy.turn_reuse import TurnReuse
from router.routing.load_policies import in_turn
from router.routing.prompt_chunks import estimate_tokens
from router.routing.route import Route

# Bytes of a request whose prefill costs a decoder little, whether or not it was asked for.
MAX_SHORT_BODY_BYTES = 4096
# Why a decoder alone answers a prompt of which it lacks little.
SHORT_PROMPT = "short"
SAME_ENGINE = "same_engine"
PROMPT_EMBEDS = "prompt_embeds"
# Why a prefiller alone answers.
ONE_TOKEN_ANSWER = "one_token"


class Mode(StrEnum):
    DECODE_ONLY = "alone"
    PULL = "pull"
    PUSH = "push"


DECODE_ONLY, PULL, PUSH = Mode


class Plan(FrozenStruct, frozen=True):
    """`flow` and `why_alone` are for the books. `threshold` above 0: the first decoder is asked
    first, and may reject; `scatter`: so are these, at once; `was_skipped`: it would be, if it were
    known to do so. `reuse`: of a turn, whose answer is kept for the next."""

    flow: str
    mode: Mode
    route: Route
    decode_only_reason: str = ""
    threshold: float = 0.0
    hedged_decoders: Sequence[Engine] = ()
    skips_threshold: bool = False
    reuse: TurnReuse | None = None


def make_plan(
    request: Request, route: Route, reuse: TurnReuse | None, limits: RequestLimits
) -> Plan:
    if request.alone == PASSED:
        if not route.decoders:  # a model that prefillers alone have
            route = replace(route, decoders=route.prefillers, prefillers=())
        return Plan(PASSED, DECODE_ONLY, route, PASSED)
    if request.alone:
        return Plan("decode_only", DECODE_ONLY, route, request.alone)
    if route.prefillers and route.decoders and route.prefillers[0] is route.decoders[0]:
        # One that is both: nobody hands KV to itself.
        others = [engine for engine in route.prefillers if engine is not route.decoders[0]]
        if not others:
            return Plan("decode_only", DECODE_ONLY, route, SAME_ENGINE, reuse=reuse)
        route = replace(route, prefillers=others)
    if PROMPT_EMBEDS in request.body and _needs_one_engine_for_embeds(request, route):
        return Plan("decode_only", DECODE_ONLY, route, PROMPT_EMBEDS, reuse=reuse)
    if _is_one_token(request, route, limits):
        route = replace(route, decoders=route.prefillers, prefillers=())
        return Plan("prefill_only", DECODE_ONLY, route, ONE_TOKEN_ANSWER)
    if limits.min_remote_prefill_tokens and _is_short(request, route, reuse, limits):
        name = "decode_only" if request.turn is None else "turn"
        return Plan(name, DECODE_ONLY, route, SHORT_PROMPT, reuse=reuse)
    mode = choose_mode(route, limits.transfer_mode)
    flow: str = mode
    if request.turn is not None:
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


def _needs_one_engine_for_embeds(request: Request, route: Route) -> bool:
    """A prefill of embeddings, where an engine gives nothing away, or takes nothing, that no token
    tells of."""
    body = request.body
    if not body.get(PROMPT_EMBEDS) or "messages" in body:  # as good as not there
        return False
    first = (*route.prefillers[:1], *route.decoders[:1])
    return any(engine.capabilities.verifies_prefix for engine in first)


def _is_one_token(request: Request, route: Route, limits: RequestLimits) -> bool:
    """The prefiller samples it in any case, and says it as a decoder would."""
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
    """The decoder surely holds so much of the prompt that it is done with the rest sooner by
    itself."""
    if not route.decoders:
        return False
    decoder, notes = route.decoders[0], route.decode_feedback
    tokens = estimate_tokens(request.body)
    held = 0 if notes is None else notes.expected_tokens(decoder.name)
    if reuse is not None and reuse.decoder is decoder:
        held = max(held, int(reuse.cached_share() * tokens))
    return tokens - held < limits.min_remote_prefill_tokens


def choose_mode(route: Route, transfer_mode: str) -> Mode:
    """By the setting, which may leave it to what the engines say of themselves."""
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
    """0 unless the decoder is known to hold most of the prompt, and may be asked."""
    share = limits.decode_first_turns
    if not share or reuse.decoder is None or THRESHOLD in request.body:
        return 0
    holds_it = reuse.cached_share() >= share
    return share if holds_it and reuse.decoder.capabilities.supports_threshold else 0


def _choose_hedged_decoders(
    request: Request, route: Route, reuse: TurnReuse | None, limits: RequestLimits
) -> Sequence[Engine]:
    """Decoders to ask at once: streams alone, for of another answer nothing shows who has accepted
    before all of it is computed; and engines that surely know the threshold, for each of the others
    would compute the prompt. Where a decoder holds the last turn it is asked alone."""
    if limits.hedged_decoders < 2 or request.exact or request.body.get("stream") is not True:
        return ()
    if reuse is not None and reuse.decoder is not None and reuse.cached_share():
        return ()
    others = in_turn(route.all_decoders, request.number)
    order = (*route.decoders, *(one for one in others if one not in route.decoders))
    able = (one for one in order if one.capabilities.supports_threshold)
    found = tuple(islice(able, limits.hedged_decoders))
    return found if len(found) > 1 else ()


def may_reject(request: Request, decoder: Engine) -> bool:
    """It may refuse to answer alone, or the prompt is short enough not to mind."""
    knows = decoder.capabilities.supports_threshold
    return knows is not False or len(request.exchange.body) <= MAX_SHORT_BODY_BYTES
