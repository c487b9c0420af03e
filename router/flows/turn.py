"""A turn of a conversation: the prefiller pulls what the last turn left on its decoder.

Turn N leaves its decoder's kv_transfer_params. Turn N+1 takes them, which only one request can,
hands them to a prefiller, and goes back to the same decoder. Both is done only as far as it is
safe: see router.conversations.guard, and prefix proofs in docs/conversations.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.conversations.conversations import Found, Turn
from router.conversations.entry import Entry
from router.conversations.guard import Fit, Verdict, cut, judge
from router.fleet.engine import Engine, Role
from router.fleet.learned import instance_of
from router.flows import legs
from router.flows.decode_first import Attempt, decode_first
from router.flows.errors import EngineError
from router.flows.gateway import Gateway
from router.flows.kept import Keeper
from router.flows.pull import note_no_params
from router.flows.release import give_up
from router.flows.request import Request
from router.flows.steps import decode, prefill
from router.policies.affinity import by_session, first
from router.upstream.errors import UpstreamError

# Differences that an engine finds by itself when it compares token hashes.
SEEN_BY_PROOF = ("history", "reasoning", "rendering")


@dataclass(slots=True)
class Reuse:
    """What the last turn left and how much of it is safe; `outcome` and `reason` for the books."""

    outcome: str
    reason: str = ""
    decoder: Engine | None = None
    entry: Entry | None = None
    verdict: Verdict | None = None
    offered: legs.Body | None = None


async def take_turn(
    request: Request, gateway: Gateway, turn: Turn, threshold: float, exact: bool
) -> None:
    gateway.require(Role.PREFILL, Role.DECODE)
    conversations = gateway.conversations
    assert conversations is not None, "there is a turn, so there are conversations"
    await conversations.recall(turn)
    reuse = _reuse(turn, gateway)
    decoders = _decoders(gateway, reuse)
    exact = exact and bool(request.body.get("stream"))
    if not await _decoder_alone(request, gateway, turn, reuse, decoders, threshold, exact):
        await _both_legs(request, gateway, turn, reuse, decoders, exact)


async def _both_legs(
    request: Request,
    gateway: Gateway,
    turn: Turn,
    reuse: Reuse,
    decoders: Sequence[Engine],
    exact: bool,
) -> None:
    params, prompt_tokens = await _prefill(request, gateway, turn, reuse)
    _count(request, gateway, reuse)
    if params is None:
        note_no_params(request, gateway)
    keeper = Keeper(turn, prompt_tokens, exact)
    try:
        body = _decode_body(request.body, params, turn, exact)
        await decode(request, gateway, body, decoders, keeper.deliver)
    except BaseException as cause:
        give_up(request, gateway, params, cause)
        raise


async def _decoder_alone(
    request: Request,
    gateway: Gateway,
    turn: Turn,
    reuse: Reuse,
    decoders: Sequence[Engine],
    threshold: float,
    exact: bool,
) -> bool:
    """Lets the decoder answer by itself, if it was asked for or if it holds most of the prompt."""
    threshold = threshold or _own_threshold(request, gateway, turn, reuse)
    if not threshold:
        return False
    body = _decode_body(request.body, None, turn, exact)
    keeper = Keeper(turn, None, exact)
    attempt = Attempt(threshold, body, decoders, keeper.deliver)
    answered = await decode_first(request, gateway, attempt)
    if answered:
        reuse.outcome, reuse.reason = "decoder_alone", ""
        _count(request, gateway, reuse)
    return answered


def _own_threshold(request: Request, gateway: Gateway, turn: Turn, reuse: Reuse) -> float:
    """0 unless the decoder is known to hold most of the prompt, and may be asked."""
    share = gateway.settings.decode_first_turns
    if not share or request.body.get(legs.THRESHOLD) is not None:
        return 0
    if reuse.decoder is None or reuse.entry is None or reuse.verdict is None:
        return 0
    reuse.decoder.learned.wanted = True
    extends = reuse.verdict.fit is Fit.HIT or reuse.verdict.reason == "rendering"
    held = reuse.entry.size / max(1, turn.prompt.size)
    knows = reuse.decoder.learned.knows_threshold
    return share if knows and extends and held >= share else 0


async def _prefill(request: Request, gateway: Gateway, turn: Turn, reuse: Reuse) -> legs.Prefilled:
    """A prefiller that could not use the last turn's KV is asked again, without: it is used up."""
    candidates = gateway.fleet.candidates(Role.PREFILL)
    order = by_session(candidates, turn.conversation.session, gateway.load_bound)

    def last_turn(engine: Engine) -> legs.Body | None:
        reuse.offered = _offer(reuse, turn, engine, gateway.settings.conversation_unproven)
        return reuse.offered

    try:
        return await prefill(request, gateway, order, last_turn)
    except (UpstreamError, EngineError):
        if reuse.entry is None:
            raise
        reuse.outcome, reuse.reason, reuse.entry, reuse.offered = "failed", "", None, None
        request.attempt += 1
        return await prefill(request, gateway, order)


def _reuse(turn: Turn, gateway: Gateway) -> Reuse:
    entry = turn.entry
    if entry is None:
        return Reuse("expired" if turn.found is Found.EXPIRED else turn.found.value)
    decoder = gateway.fleet.named(Role.DECODE, entry.decoder)
    if decoder is None or not _is_same(decoder, entry):
        return Reuse("decoder_gone")
    if gateway.load_bound.exceeded(decoder, gateway.fleet.candidates(Role.DECODE)):
        return Reuse("decoder_overloaded")
    verdict = judge(entry, turn.prompt, turn.scope)
    return Reuse(verdict.fit.value, verdict.reason, decoder, entry, verdict)


def _is_same(decoder: Engine, entry: Entry) -> bool:
    """Whether it still runs as it did when the last turn ended."""
    known = decoder.learned.engine_id
    if None not in (known, entry.engine_id) and known != instance_of(entry.engine_id or ""):
        return False
    return decoder.lost_at < entry.created_at


def _offer(reuse: Reuse, turn: Turn, prefiller: Engine, unproven: str) -> legs.Body | None:
    """What this prefiller may pull, and in `reuse` what that comes to."""
    entry, verdict = reuse.entry, reuse.verdict
    if entry is None or verdict is None:
        return None
    reuse.outcome, reuse.reason = verdict.fit.value, verdict.reason
    if verdict.reason == "model":
        return None
    whole = verdict.fit is Fit.HIT
    proven = entry.is_proven and prefiller.learned.proves_prefix
    if proven and (whole or not turn.prompt.has_media):
        if verdict.reason in SEEN_BY_PROOF:
            reuse.outcome = Fit.CUT.value
        return entry.params
    if whole and unproven == "whole":
        return entry.params
    params = cut(entry.params, verdict.tokens) if verdict.tokens and unproven != "off" else None
    reuse.outcome = (Fit.MISMATCH if params is None else Fit.CUT).value
    reuse.reason = reuse.reason or "unproven"
    return params


def _decoders(gateway: Gateway, reuse: Reuse) -> list[Engine]:
    if reuse.decoder is None:
        return gateway.in_turn(Role.DECODE)
    return first(gateway.fleet.candidates(Role.DECODE), reuse.decoder)


def _decode_body(body: legs.Body, params: legs.Body | None, turn: Turn, exact: bool) -> legs.Body:
    """Asks the decoder to keep this turn's KV, unless it could not be found again."""
    if exact:
        body = legs.whole_body(body)
    if turn.found is Found.STORE_FAILED:
        return legs.decode_body(body, params)
    return legs.decode_body(body, legs.retaining(params))


def _count(request: Request, gateway: Gateway, reuse: Reuse) -> None:
    request.record.conversation = reuse.outcome
    gateway.metrics.conversation_turns.labels(reuse.outcome, reuse.reason).inc()
    tokens = None if reuse.offered is None else reuse.offered.get("remote_num_tokens")
    if type(tokens) is int and tokens > 0:
        gateway.metrics.conversation_tokens.inc(tokens)
