"""Decide which KV of a conversation's last turn a prefill engine may read. No I/O.

What a prefill engine may read depends on that engine (`TurnReuse.offer`). An engine that verifies
prefix hashes takes what it finds equal. A stock engine matches KV by position, so it is offered the
blocks that the *tokens* of both turns prove equal; the caller knows those of the prompt. Only where
the operator asks for it, the messages decide (`entry.decide_reuse`).
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from router.conversations.conversations import Turn
from router.conversations.entry import CUT, HIT, MAX_COUNT, MISMATCH, Entry, ReuseDecision
from router.fleet.capabilities import dp_rank_of, strip_dp_rank
from router.fleet.engine import DECODE, PREFILL, SERVING, Engine
from router.fleet.fleet import Fleet
from router.openai.answers import Json
from router.routing.policy import LoadBound

BLOCK_SIZES = tuple(2**power for power in range(11))
# Reasons of a ReuseDecision that a prefill engine detects when it compares prefix hashes.
FOUND_BY_PREFIX_HASHES = ("history", "reasoning", "rendering")


class TurnOffer(Struct, frozen=True):
    """The part of the last turn's KV that a prefill engine may read."""

    outcome: str
    reason: str = ""
    """Label values of the metric conversation_turns_total, as is `outcome`."""
    params: Json | None = None
    """The KV transfer params that the engine gets, None if it may read nothing."""
    tokens: int = 0
    """How many tokens of KV are offered."""


# The last turn's KV was read by a leg that failed, and can be read only once.
SPENT_TURN = TurnOffer("failed")


class TurnReuse(Struct, frozen=True):
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
    cached_share: float = 0.0
    """About the share of this prompt that the decode engine has in its cache; 0 if the prompt does
    not extend the last turn."""
    rank: int | None = None
    """The data-parallel rank of `decoder` that has the last turn in its cache, by its value of the
    header, if the engine has several ranks."""

    def needs_tokens(self, prefiller: Engine) -> bool:
        """Return True if the prompt's token ids decide what this prefill engine may read."""
        entry = self.entry
        return (
            self.unproven == "tokens"
            and entry is not None
            and entry.tokens is not None
            and prefiller.group == self.group
            and prefiller.name != entry.decoder
            and not (prefiller.capabilities.verifies_prefix and "prefix_proof" in entry.params)
            and not self.turn.prompt.has_media  # whose tokens are the same for all images
        )

    def offer(self, prefiller: Engine, prompt_ids: Sequence[int] | None = None) -> TurnOffer:
        """Return what this prefill engine may read of the last turn.

        `prompt_ids` are the token ids of the prompt, if they are known.
        """
        entry, decision = self.entry, self.decision
        if entry is None or decision is None:
            return TurnOffer(self.outcome, self.reason)
        if prefiller.group != self.group:
            return TurnOffer(MISMATCH, "group")
        if prefiller.name == entry.decoder:  # of both roles: the KV is in its own cache
            return TurnOffer(decision.match, decision.reason)
        if decision.reason == "model":
            return TurnOffer(decision.match, decision.reason)
        verifies = prefiller.capabilities.verifies_prefix
        if entry.params.get("revocable") is True and not verifies:
            # The engine could not detect that the decode engine has dropped the turn.
            return TurnOffer(MISMATCH, "unproven")
        is_whole = decision.match is HIT
        is_proven = verifies and isinstance(entry.params.get("prefix_proof"), dict)
        if is_proven and (is_whole or not self.turn.prompt.has_media):
            match = CUT if decision.reason in FOUND_BY_PREFIX_HASHES else decision.match
            return _offer_params(match, decision.reason, entry.params)
        if self.unproven == "tokens":
            return self._offer_equal_tokens(entry, decision, prompt_ids)
        if is_whole and self.unproven == "whole":
            return _offer_params(decision.match, decision.reason, entry.params)
        params = None if self.unproven == "off" else truncate_params(entry.params, decision.tokens)
        reason = decision.reason or "unproven"
        if params is None:
            return TurnOffer(MISMATCH, reason)
        return _offer_params(CUT, reason, params)

    def _offer_equal_tokens(
        self, entry: Entry, decision: ReuseDecision, prompt_ids: Sequence[int] | None
    ) -> TurnOffer:
        """Offer the blocks whose tokens are those of the prompt, but not the prompt's last token:
        the engine must compute one."""
        if prompt_ids is None or entry.tokens is None or self.turn.prompt.has_media:
            return TurnOffer(MISMATCH, decision.reason or "unproven")
        equal = entry.tokens.common(prompt_ids)
        held = entry.params.get("remote_num_tokens")
        if equal == held and equal < len(prompt_ids):
            return _offer_params(HIT, "", entry.params)
        params = truncate_params(entry.params, min(equal, len(prompt_ids) - 1))
        reason = decision.reason or "rendering"
        if params is None:
            return TurnOffer(MISMATCH, reason)
        return _offer_params(CUT, reason, params)


def _offer_params(match: str, reason: str, params: Json) -> TurnOffer:
    count = params.get("remote_num_tokens")
    tokens = count if type(count) is int and 0 < count <= MAX_COUNT else 0
    return TurnOffer(match, reason, params, tokens)


def find_reuse(turn: Turn, fleet: Fleet, bound: LoadBound, unproven: str) -> TurnReuse:
    """Return what a request may use of the turn's recalled entry.

    `bound` limits the load up to which the decode engine of the last turn is preferred.
    """
    entry, decision = turn.entry, turn.decision
    if entry is None or decision is None:
        return TurnReuse(turn, unproven, turn.recalled)
    engine_id = entry.params.get("remote_engine_id")
    decoder = fleet.find_alive(entry.decoder)
    if decoder is None or decoder.role is PREFILL or decoder.lost_at >= entry.created_at:
        return TurnReuse(turn, unproven, "decoder_gone")
    known = decoder.capabilities.engine_id
    is_same = known is None or not isinstance(engine_id, str) or known == engine_id
    if not is_same and known != strip_dp_rank(str(engine_id)):  # the engine has restarted
        return TurnReuse(turn, unproven, "decoder_gone")
    home: Engine | None = decoder
    if decoder.intent is not SERVING:
        home = None
    elif decoder.total_legs >= bound.floor and bound.is_overloaded(
        decoder, fleet.usable_engines(DECODE)
    ):
        return TurnReuse(turn, unproven, "decoder_overloaded")
    extends = decision.match is HIT or decision.reason == "rendering"
    return TurnReuse(
        turn,
        unproven,
        outcome=decision.match,
        reason=decision.reason,
        decoder=home,
        entry=entry,
        decision=decision,
        group=decoder.group,
        cached_share=entry.size / max(1, turn.prompt.size) if extends else 0.0,
        rank=_rank_in(engine_id, decoder) if len(decoder.capabilities.rank_endpoints) > 1 else None,
    )


def truncate_params(params: Json, tokens: int) -> Json | None:
    """Return `kv_transfer_params` for the whole blocks within the first `tokens` tokens.

    Returns None where it is uncertain which blocks those are: with several KV-cache groups, or with
    a block size that does not follow from the numbers.
    """
    groups, held = params.get("remote_block_ids"), params.get("remote_num_tokens")
    if not isinstance(groups, list) or len(groups) != 1 or type(held) is not int:
        return None
    blocks = groups[0]
    if not isinstance(blocks, list):
        return None
    sizes = [size for size in BLOCK_SIZES if -(-held // size) == len(blocks)]
    if len(sizes) != 1:
        return None
    kept = min(tokens, held) // sizes[0]
    if kept == 0:
        return None
    return {**params, "remote_block_ids": [blocks[:kept]], "remote_num_tokens": kept * sizes[0]}


def _rank_in(engine_id: object, decoder: Engine) -> int | None:
    rank = dp_rank_of(engine_id) if isinstance(engine_id, str) else None
    if rank is None or rank not in decoder.capabilities.rank_endpoints:
        return None
    return decoder.capabilities.header_value(rank)
