"""What of the last turn's KV one request may use, and at which prefiller: no I/O here."""

from __future__ import annotations

from dataclasses import dataclass

from router.conversations.conversations import Turn
from router.conversations.entry import Entry
from router.conversations.guard import Fit, Verdict, cut, judge
from router.fleet.engine import Engine, Role
from router.fleet.fleet import Fleet
from router.fleet.learned import instance_of
from router.flows.legs import Body
from router.policies.affinity import LoadBound

# Differences that an engine finds by itself when it compares token hashes.
SEEN_BY_PROOF = ("history", "reasoning", "rendering")


@dataclass(slots=True)
class Reuse:
    """`decoder`, `entry` and `verdict` are there together: a last turn at a decoder that may be
    asked. `offered` is what a prefiller was told to pull; `outcome` and `reason` are for the books.
    """

    outcome: str
    reason: str = ""
    decoder: Engine | None = None
    entry: Entry | None = None
    verdict: Verdict | None = None
    offered: Body | None = None

    @property
    def offered_tokens(self) -> int:
        tokens = None if self.offered is None else self.offered.get("remote_num_tokens")
        return tokens if type(tokens) is int and tokens > 0 else 0

    def held_share(self, turn: Turn) -> float:
        """About how much of this prompt the decoder has; 0 if it does not extend the last one."""
        if self.entry is None or self.verdict is None:
            return 0
        extends = self.verdict.fit is Fit.HIT or self.verdict.reason == "rendering"
        return self.entry.size / max(1, turn.prompt.size) if extends else 0

    def offer(self, turn: Turn, prefiller: Engine, unproven: str) -> Body | None:
        """What this prefiller may pull. `unproven` is the setting conversation_unproven."""
        self.offered = None
        if self.entry is not None and self.verdict is not None:
            self.outcome, self.reason = self.verdict.fit.value, self.verdict.reason
            if self.verdict.reason != "model":
                self.offered = self._offer(self.entry, self.verdict, turn, prefiller, unproven)
        return self.offered

    def fail(self) -> None:
        """The last turn's KV is used up, and was of no use."""
        self.outcome, self.reason, self.entry, self.offered = "failed", "", None, None

    def _offer(
        self, entry: Entry, verdict: Verdict, turn: Turn, prefiller: Engine, unproven: str
    ) -> Body | None:
        whole = verdict.fit is Fit.HIT
        proven = entry.is_proven and prefiller.learned.proves_prefix
        if proven and (whole or not turn.prompt.has_media):
            if verdict.reason in SEEN_BY_PROOF:
                self.outcome = Fit.CUT.value
            return entry.params
        if whole and unproven == "whole":
            return entry.params
        params = None if unproven == "off" else cut(entry.params, verdict.tokens)
        self.outcome = (Fit.MISMATCH if params is None else Fit.CUT).value
        self.reason = self.reason or "unproven"
        return params


def find_reuse(turn: Turn, fleet: Fleet, bound: LoadBound) -> Reuse:
    """What recalling the last turn came to."""
    entry = turn.entry
    if entry is None:
        return Reuse(turn.found.value)
    decoder = fleet.named(Role.DECODE, entry.decoder)
    if decoder is None or not _is_same(decoder, entry):
        return Reuse("decoder_gone")
    if bound.exceeded(decoder, fleet.candidates(Role.DECODE)):
        return Reuse("decoder_overloaded")
    verdict = judge(entry, turn.prompt, turn.scope)
    return Reuse(verdict.fit.value, verdict.reason, decoder, entry, verdict)


def _is_same(decoder: Engine, entry: Entry) -> bool:
    """Whether it still runs as it did when the last turn ended."""
    known, then = decoder.learned.engine_id, entry.engine_id
    if known is not None and then is not None and known != instance_of(then):
        return False
    return decoder.lost_at < entry.created_at
