"""Who holds which KV block, and which blocks hold contents worth finding again."""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence

from engine_ext.reference.integrity import require


class BlockPool:
    """A block's state is the container it sits in.

    `_refs`      held; the value counts the holders
    `_reusable`  held by nobody, contents known by digest; least recently freed first
    `_empty`     held by nobody, contents worthless

    `_block_of` and `_digest_of` are the two directions of the prefix cache. A held block may be in
    it too: full blocks are never written again, so they can be shared.
    """

    def __init__(self, block_ids: Iterable[int]) -> None:
        self._empty = deque(block_ids)
        self._reusable: OrderedDict[int, None] = OrderedDict()
        self._refs: dict[int, int] = {}
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._universe = frozenset(self._empty)

    @property
    def num_total(self) -> int:
        return len(self._universe)

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._reusable)

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known prefix, in order. Valid until the next `allocate`."""
        found: list[int] = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def allocate(self, count: int, *, sharing: Sequence[int] = ()) -> list[int] | None:
        """Hold the found blocks `sharing` and `count` new ones; the new ones are returned.

        None, and nothing is held, where there are too few.
        """
        idle_hits = sum(block in self._reusable for block in sharing)
        if count > self.num_free - idle_hits:
            return None
        for block in sharing:
            self._reusable.pop(block, None)
            self._refs[block] = self._refs.get(block, 0) + 1
        return [self._take() for _ in range(count)]

    def remember(self, block: int, digest: bytes) -> None:
        """The held `block` is full from now on. The first block of a digest is the one found."""
        assert block in self._refs
        if digest not in self._block_of and block not in self._digest_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def forget(self, block: int) -> None:
        """The held `block` cannot be found any more."""
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
                self._retire(block)

    def _retire(self, block: int) -> None:
        if block in self._digest_of:
            self._reusable[block] = None
        else:
            self._empty.append(block)

    def _take(self) -> int:
        if self._empty:
            block = self._empty.popleft()
        else:
            block, _ = self._reusable.popitem(last=False)
            del self._block_of[self._digest_of.pop(block)]
        self._refs[block] = 1
        return block

    def check_integrity(self, holders: Mapping[int, int]) -> None:
        """`holders`: block -> how many hold it, counted by the caller. Raises IntegrityError."""
        places = [*self._empty, *self._reusable, *self._refs]
        require(Counter(places) == Counter(self._universe), "a block is lost or in two places")
        require(dict(holders) == self._refs, "reference counts differ from the holders")
        require(
            {block: digest for digest, block in self._block_of.items()} == self._digest_of,
            "the two directions of the prefix cache differ",
        )
        require(self._reusable.keys() <= self._digest_of.keys(), "a reusable block is unknown")
        require(not self._digest_of.keys() & set(self._empty), "an empty block can be found")
