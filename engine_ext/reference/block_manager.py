"""A sequence's blocks: finding its prefix, growing its table, giving everything back."""

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from engine_ext.reference.block_pool import BlockPool
from engine_ext.reference.kv_cache import NULL_BLOCK
from engine_ext.reference.sequence import Sequence as Request

_ROOT = b""


def chain_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Names a full block by all tokens up to its end. 256 bits: equal means the same tokens."""
    return hashlib.blake2b(
        parent + np.asarray(token_ids, dtype="<i8").tobytes(), digest_size=32
    ).digest()


class BlockManager:
    def __init__(self, *, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self._pool = BlockPool(range(NULL_BLOCK + 1, num_blocks))
        self._block_size = block_size
        self._caching = enable_prefix_caching

    @property
    def num_total(self) -> int:
        return self._pool.num_total

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def block_size(self) -> int:
        return self._block_size

    def find_prefix(self, seq: Request) -> list[int]:
        """Cached blocks of `seq`'s tokens, the last token left out: it is always computed."""
        if not self._caching:
            return []
        return self._pool.find(self._digests(seq, (seq.num_tokens - 1) // self._block_size))

    def admit(self, seq: Request, prefix: Sequence[int]) -> list[int] | None:
        """Give `seq` the found `prefix` and new blocks for the rest of its tokens.

        All at once: a chunk, or a load, that finds none half way would have to start over.
        Returns the new blocks; None, and nothing changed, where there are too few.
        """
        assert not seq.block_ids
        fresh = self._pool.allocate(self._missing(len(prefix), seq.num_tokens), sharing=prefix)
        if fresh is not None:
            seq.block_ids = [*prefix, *fresh]
            seq.num_committed_blocks = len(prefix)
        return fresh

    def grow(self, seq: Request, num_tokens: int) -> list[int] | None:
        """New blocks for `num_tokens` tokens in all, or None, and nothing changed."""
        fresh = self._pool.allocate(self._missing(len(seq.block_ids), num_tokens))
        if fresh is not None:
            seq.block_ids += fresh
        return fresh

    def commit(self, seq: Request) -> None:
        """Let others find the blocks that `seq.num_computed_tokens` fills."""
        full = seq.num_computed_tokens // self._block_size
        if not self._caching or full <= seq.num_committed_blocks:
            return
        digests = self._digests(seq, full)
        for index in range(seq.num_committed_blocks, full):
            self._pool.remember(seq.block_ids[index], digests[index])
        seq.num_committed_blocks = full

    def forget(self, seq: Request) -> None:
        """Nobody is to find the contents of `seq`'s blocks again."""
        for block in seq.block_ids:
            self._pool.forget(block)

    def free(self, seq: Request) -> None:
        self.free_blocks(self.detach(seq))

    def detach(self, seq: Request) -> list[int]:
        """The blocks of `seq`, which are the caller's to free from now on."""
        blocks, seq.block_ids = seq.block_ids, []
        seq.num_committed_blocks = 0
        return blocks

    def free_blocks(self, blocks: Sequence[int]) -> None:
        self._pool.free(blocks)

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        holders: dict[int, int] = {}
        for blocks in held:
            for block in blocks:
                holders[block] = holders.get(block, 0) + 1
        self._pool.check_integrity(holders)

    def _missing(self, have: int, num_tokens: int) -> int:
        return max(0, -(-num_tokens // self._block_size) - have)

    def _digests(self, seq: Request, count: int) -> list[bytes]:
        size = self._block_size
        while len(seq.digests) < count:
            start = len(seq.digests) * size
            parent = seq.digests[-1] if seq.digests else _ROOT
            seq.digests.append(chain_digest(parent, seq.token_ids[start : start + size]))
        return seq.digests[:count]
