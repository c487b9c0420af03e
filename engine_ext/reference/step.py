"""What one engine step does: the scheduler fills it in, the engine core carries it out."""

from dataclasses import dataclass, field

from engine_ext.reference.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `num_tokens` tokens of a sequence, to be run through the model."""

    seq: Sequence
    num_tokens: int

    @property
    def end(self) -> int:
        return self.seq.num_computed_tokens + self.num_tokens

    @property
    def reaches_end(self) -> bool:
        """Whether the sequence's next token can be sampled after it."""
        return self.end == self.seq.num_tokens


@dataclass(slots=True)
class SchedulerStep:
    budget: int
    """Tokens that may still be added."""
    seats: int = 0
    """Sequences that may still be admitted: each is to have a token in this step."""
    num_admitted: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    fresh_blocks: list[int] = field(default_factory=list)
    """Newly handed out, to be computed into, with stale contents."""
    parked: list[Sequence] = field(default_factory=list)
    """Began to wait for remote KV in this step."""
    ended: list[Sequence] = field(default_factory=list)
    """Ended while being scheduled."""
    num_preempted: int = 0
    must_ask_again: bool = False
    """The connector wants to be asked about a waiting request once more."""

    def add(self, seq: Sequence, num_tokens: int) -> None:
        self.chunks.append(Chunk(seq, num_tokens))
        self.budget -= num_tokens

    def admit(self, fresh_blocks: list[int]) -> None:
        """A sequence runs from now on; `add` tells how far it comes in this step."""
        self.seats -= 1
        self.num_admitted += 1
        self.fresh_blocks += fresh_blocks
