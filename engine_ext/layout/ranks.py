"""Tensor parallelism: which heads a rank holds, and which remote ranks it talks to.

Ranks of two engines are lined up by the heads they hold. Where one engine has k times the ranks of
the other, k neighbours there face one rank here. An engine with more ranks than the model has KV
heads keeps copies: neighbours hold the same head, and one copy is enough to read.
"""

from typing import NamedTuple

MAX_FACED = 64
"""Most remote ranks that one rank talks to."""


class RankError(Exception):
    """The two engines' parallel sizes do not go together."""


class TensorRank(NamedTuple):
    rank: int
    size: int

    def heads(self, num_kv_heads: int) -> range:
        """The KV heads held here. Raises RankError where heads and ranks do not divide."""
        larger, smaller = max(self.size, num_kv_heads), min(self.size, num_kv_heads)
        if larger % smaller:
            raise RankError(f"{num_kv_heads} KV heads on {self.size} ranks")
        first = self.rank * num_kv_heads // self.size
        return range(first, first + max(1, num_kv_heads // self.size))

    def faces(self, size: int) -> range:
        """The ranks of an engine of `size` ranks that hold our heads, copies included."""
        larger, smaller = max(self.size, size), min(self.size, size)
        if smaller < 1 or larger % smaller:
            raise RankError(f"tensor parallel size differs: {self.size} here, {size} there")
        first = self.rank * size // self.size
        faced = range(first, first + max(1, size // self.size))
        if len(faced) > MAX_FACED:
            raise RankError(f"{len(faced)} remote ranks for one of ours: at most {MAX_FACED}")
        return faced

    def facing(self, size: int) -> int:
        """How many of our ranks talk to one rank of an engine of `size` ranks."""
        return max(1, self.size // size)


def is_spare(holder: TensorRank, reader: TensorRank, num_kv_heads: int) -> bool:
    """The reader has all that `holder` holds from an earlier rank: a copy that it need not read."""
    first = reader.faces(holder.size)[0]
    if holder.rank == first:
        return False
    before = TensorRank(holder.rank - 1, holder.size)
    return before.heads(num_kv_heads) == holder.heads(num_kv_heads)
