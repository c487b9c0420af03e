"""Tensor parallelism: the heads that a rank holds, and the remote ranks that it exchanges KV with.

Ranks of two engines are matched by the heads that they hold. If one engine has k times the ranks of
the other, k neighbouring ranks there face one rank here. An engine with more ranks than the model
has KV heads keeps copies: neighbours hold the same head, and only one copy is read.
"""

from typing import NamedTuple

MAX_FACED = 64
"""The most remote ranks that one rank exchanges KV with."""


class RankError(Exception):
    """The tensor parallel sizes of two engines do not match."""


class TensorRank(NamedTuple):
    rank: int
    size: int

    def heads(self, num_kv_heads: int) -> range:
        """Return the KV heads of this rank. Raises RankError if heads and ranks do not divide."""
        larger, smaller = max(self.size, num_kv_heads), min(self.size, num_kv_heads)
        if larger % smaller:
            raise RankError(f"{num_kv_heads} KV heads on {self.size} ranks")
        first = self.rank * num_kv_heads // self.size
        return range(first, first + max(1, num_kv_heads // self.size))

    def faces(self, size: int) -> range:
        """Return the ranks of an engine of `size` ranks that hold our heads, copies included.
        Raises RankError."""
        larger, smaller = max(self.size, size), min(self.size, size)
        if smaller < 1 or larger % smaller:
            raise RankError(f"tensor parallel size differs: {self.size} here, {size} there")
        first = self.rank * size // self.size
        faced = range(first, first + max(1, size // self.size))
        if len(faced) > MAX_FACED:
            raise RankError(f"{len(faced)} remote ranks for one local rank: at most {MAX_FACED}")
        return faced

    def facing(self, size: int) -> int:
        """Return how many of our ranks face one rank of an engine of `size` ranks."""
        return max(1, self.size // size)


def common_range(ours: range, theirs: range) -> range:
    """Return the heads, or other items, that two ranks both hold. Raises RankError for none."""
    common = range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))
    if not common:
        raise RankError(f"ranks with {ours} here and {theirs} there share no heads")
    return common


def is_spare(holder: TensorRank, reader: TensorRank, num_kv_heads: int) -> bool:
    """Return True if `holder` has only copies of what the reader reads from an earlier rank."""
    first = reader.faces(holder.size)[0]
    if holder.rank == first:
        return False
    before = TensorRank(holder.rank - 1, holder.size)
    return before.heads(num_kv_heads) == holder.heads(num_kv_heads)
