"""Decides what a request may reuse of the KV that its conversation's last turn has left. No I/O."""

from __future__ import annotations

from router.common.structs import FrozenStruct
from router.conversations.conversations import Turn
from router.conversations.entry import MAX_COUNT, Entry
from router.conversations.reuse import (
    ReuseDecision,
    ReuseMatch,
    decide_reuse,
    truncate_params,
)
from router.fleet.engine import Engine, EngineRole, Intent, dp_rank_of, strip_dp_rank
from router.fleet.fleet import Fleet
from router.proxy.request import Body
from router.routing.policy import LoadBound

# Reasons of a ReuseDecision that a prefill engine detects when it compares prefix hashes.
FOUND_BY_PREFIX_HASHES = ("history", "reasoning", "rendering")


class TurnOffer(FrozenStruct, frozen=True):
    """The part of the last turn's KV that a prefill engine may read."""

    outcome: str
    reason: str = ""
    """Label values of the metric conversation_turns_total, as is `outcome`."""
    params: Body | None = None
    """The KV transfer params that the engine gets, None if it may read nothing."""

    @property
    def tokens(self) -> int:
        """How many tokens of KV are offered."""
        count = None if self.params is None else self.params.get("remote_num_tokens")
        return count if type(count) is int and 0 < count <= MAX_COUNT else 0


class TurnReuse(FrozenStruct, frozen=True):
    """The part of a conversation's last turn that one request may use.

    `entry` and `decision` are set if a decode engine still has the KV of that turn. `decoder` is
    that engine if it takes new requests; KV of a draining engine can still be read. `unproven` is
    the setting conversation_unproven. `outcome` and `reason` are label values of a metric.
    """

    turn: Turn
    unproven: str
    outcome: str
    reason: str = ""
    decoder: Engine | None = None
    entry: Entry | None = None
    decision: ReuseDecision | None = None
    group: str = ""
    """The group of the engine that has the KV."""

    def cached_share(self) -> float:
        """Return the share of this prompt that the decode engine has in its cache, about; 0 if the
        prompt does not extend the last turn."""
        if self.entry is None or self.decision is None:
            return 0
        extends = self.decision.match is ReuseMatch.HIT or self.decision.reason == "rendering"
        return self.entry.size / max(1, self.turn.prompt.size) if extends else 0

    def rank_at(self, engine: Engine) -> int | None:
        """Return the data-parallel rank of the engine that has the last turn in its cache, or None
        if the engine has one rank only, or is another engine."""
        engine_id = None if self.entry is None else self.entry.engine_id
        if (
            engine is not self.decoder
            or engine_id is None
            or len(engine.capabilities.rank_endpoints) < 2
        ):
            return None
        number = dp_rank_of(engine_id)
        return number if number in engine.capabilities.rank_endpoints else None

    def offer(self, prefiller: Engine) -> TurnOffer:
        """Return what this prefill engine may read of the last turn."""
        entry, decision = self.entry, self.decision
        if entry is None or decision is None:
            return TurnOffer(self.outcome, self.reason)
        if prefiller.group != self.group:
            return TurnOffer(ReuseMatch.MISMATCH, "group")
        if decision.reason == "model":
            return TurnOffer(decision.match, decision.reason)
        if entry.is_revocable and not prefiller.capabilities.verifies_prefix:
            # The engine could not detect that the decode engine has dropped the turn.
            return TurnOffer(ReuseMatch.MISMATCH, "unproven")
        whole = decision.match is ReuseMatch.HIT
        proven = entry.has_prefix_hashes and prefiller.capabilities.verifies_prefix
        if proven and (whole or not self.turn.prompt.has_media):
            match = ReuseMatch.CUT if decision.reason in FOUND_BY_PREFIX_HASHES else decision.match
            return TurnOffer(match, decision.reason, entry.params)
        if whole and self.unproven == "whole":
            return TurnOffer(decision.match, decision.reason, entry.params)
        params = None if self.unproven == "off" else truncate_params(entry.params, decision.tokens)
        match = ReuseMatch.MISMATCH if params is None else ReuseMatch.CUT
        return TurnOffer(match, decision.reason or "unproven", params)


# The last turn's KV was read by a leg that failed, and can be read only once.
SPENT_TURN = TurnOffer("failed")


def find_reuse(turn: Turn, fleet: Fleet, bound: LoadBound, unproven: str) -> TurnReuse:
    """Return what a request may use of the turn's recalled entry.

    `bound` limits the load up to which the decode engine of the last turn is preferred.
    """
    entry = turn.entry
    if entry is None:
        return TurnReuse(turn, unproven, turn.recalled)
    decoder = fleet.find_alive(entry.decoder)
    if (
        decoder is None
        or not decoder.role.plays(EngineRole.DECODE)
        or not _runs_unchanged(decoder, entry)
    ):
        return TurnReuse(turn, unproven, "decoder_gone")
    home: Engine | None = decoder
    if decoder.intent is not Intent.SERVING:
        home = None
    elif decoder.in_flight >= bound.floor and bound.is_overloaded(
        decoder, fleet.usable_engines(EngineRole.DECODE)
    ):
        return TurnReuse(turn, unproven, "decoder_overloaded")
    decision = decide_reuse(entry, turn.prompt, turn.scope)
    return TurnReuse(
        turn, unproven, decision.match, decision.reason, home, entry, decision, decoder.group
    )


def _runs_unchanged(decoder: Engine, entry: Entry) -> bool:
    """Return True if the engine has not restarted since the last turn ended."""
    known, then = decoder.capabilities.engine_id, entry.engine_id
    if known is not None and then is not None and known != strip_dp_rank(then):
        return False
    return decoder.lost_at < entry.created_at
