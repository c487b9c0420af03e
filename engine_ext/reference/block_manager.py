"""Who holds which KV block, and which blocks hold contents worth finding again."""

import hashlib
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence

import numpy as np

from engine_ext.reference.kv_cache import NULL_BLOCK
from engine_ext.reference.sequence import Sequence as Request


class IntegrityError(RuntimeError):
    """The engine's own bookkeeping contradicts itself."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise IntegrityError(message)


def chain_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Names a full block by all tokens up to its end. 256 bits: equal means the same tokens."""
    tokens = np.asarray(token_ids, dtype="<i8").tobytes()
    return hashlib.blake2b(parent + tokens, digest_size=32).digest()


def root_digest(seq: Request) -> bytes:
    """Return what the chain of a request's digests begins with: empty unless it has a salt."""
    if not seq.content_keys:
        return b""
    return hashlib.blake2b(repr(seq.content_keys).encode(), digest_size=32, person=b"root").digest()


class BlockManager:
    """A block's state is the container it sits in.

    `_refs`      held; the value counts the holders
    `_reusable`  without a holder, contents known by digest; least recently freed first
    `_empty`     without a holder, contents worthless

    `_block_of` and `_digest_of` are the two directions of the prefix cache. A held block may be in
    it too: full blocks are never written again, so they can be shared.
    """

    def __init__(self, *, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.block_size = block_size
        self._caching = enable_prefix_caching
        self._universe = frozenset(range(NULL_BLOCK + 1, num_blocks))
        self._empty = deque(self._universe)
        self._reusable: OrderedDict[int, None] = OrderedDict()
        self._refs: dict[int, int] = {}
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def num_total(self) -> int:
        return len(self._universe)

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._reusable)

    def find_prefix(self, seq: Request) -> list[int]:
        """Cached blocks of `seq`'s tokens, the last token left out: it is always computed."""
        if not self._caching:
            return []
        return self.find(self._digests(seq, (seq.num_tokens - 1) // self.block_size))

    def admit(self, seq: Request, prefix: Sequence[int]) -> list[int] | None:
        """Give `seq` the found `prefix` and new blocks for the rest of its tokens.

        All at once: a chunk, or a load, that finds none half way would have to start over.
        Returns the new blocks; None, and nothing changed, if there are too few.
        """
        assert not seq.block_ids
        missing = max(0, -(-seq.num_tokens // self.block_size) - len(prefix))
        fresh = self.allocate(missing, sharing=prefix)
        if fresh is not None:
            seq.block_ids = [*prefix, *fresh]
            seq.num_committed_blocks = len(prefix)
        return fresh

    def grow(self, seq: Request) -> list[int] | None:
        """New blocks for all tokens of `seq`; None, and nothing changed, if there are too few."""
        missing = max(0, -(-seq.num_tokens // self.block_size) - len(seq.block_ids))
        fresh = self.allocate(missing)
        if fresh is not None:
            seq.block_ids += fresh
        return fresh

    def commit(self, seq: Request) -> None:
        """Let others find the blocks that `seq.num_computed_tokens` fills."""
        full = seq.num_computed_tokens // self.block_size
        if not self._caching or full <= seq.num_committed_blocks:
            return
        digests = self._digests(seq, full)
        for index in range(seq.num_committed_blocks, full):
            self.remember(seq.block_ids[index], digests[index])
        seq.num_committed_blocks = full

    def detach(self, seq: Request) -> list[int]:
        """The blocks of `seq`, which the caller has to free from now on."""
        blocks, seq.block_ids = seq.block_ids, []
        seq.num_committed_blocks = 0
        return blocks

    def digests_of(self, seq: Request) -> list[bytes]:
        """The names of all full blocks of `seq`'s tokens."""
        return self._digests(seq, seq.num_tokens // self.block_size)

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known prefix, in order. Valid until the next `allocate`."""
        found: list[int] = []
        for digest in digests:
            if (block := self._block_of.get(digest)) is None:
                break
            found.append(block)
        return found

    def allocate(self, count: int, *, sharing: Sequence[int] = ()) -> list[int] | None:
        """Hold the found blocks `sharing` and `count` new ones; the new ones are returned.

        None, and nothing is held, if there are too few.
        """
        idle_hits = sum(block in self._reusable for block in sharing)
        if count > self.num_free - idle_hits:
            return None
        for block in sharing:
            self._reusable.pop(block, None)
            self._refs[block] = self._refs.get(block, 0) + 1
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._empty:
            block = self._empty.popleft()
        else:
            block, _ = self._reusable.popitem(last=False)
            del self._block_of[self._digest_of.pop(block)]
        self._refs[block] = 1
        return block

    def remember(self, block: int, digest: bytes) -> None:
        """The held `block` is full from now on. The first block of a digest is the one found."""
        assert block in self._refs
        if digest not in self._block_of and block not in self._digest_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def forget(self, blocks: Iterable[int]) -> None:
        """The contents of these held blocks cannot be found any more."""
        for block in blocks:
            assert block in self._refs
            digest = self._digest_of.pop(block, None)
            if digest is not None:
                del self._block_of[digest]

    def free(self, blocks: Sequence[int]) -> None:
        """Last block first, so that a prefix outlives its continuations."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                del self._refs[block]
                if block in self._digest_of:
                    self._reusable[block] = None
                else:
                    self._empty.append(block)

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """`held`: the blocks of each holder. Raises IntegrityError."""
        holders = Counter(block for blocks in held for block in blocks)
        places = [*self._empty, *self._reusable, *self._refs]
        require(Counter(places) == Counter(self._universe), "a block is lost or in two places")
        require(dict(holders) == self._refs, "reference counts differ from the holders")
        inverse = {block: digest for digest, block in self._block_of.items()}
        require(inverse == self._digest_of, "the two directions of the prefix cache differ")
        require(self._reusable.keys() <= self._digest_of.keys(), "a reusable block is unknown")
        require(not self._digest_of.keys() & set(self._empty), "an empty block can be found")

    def _digests(self, seq: Request, count: int) -> list[bytes]:
        size = self.block_size
        while len(seq.digests) < count:
            start = len(seq.digests) * size
            parent = seq.digests[-1] if seq.digests else root_digest(seq)
            seq.digests.append(chain_digest(parent, seq.token_ids[start : start + size]))
        return seq.digests[:count]
