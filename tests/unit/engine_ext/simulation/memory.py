"""One engine's blocks: what they hold, whose they are, and which of them are free."""

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

BLOCK_SIZE = 4
NUM_BLOCKS = 24

Content = tuple[int, ...]
"""All tokens up to the block's end, or a canary: a negative number, once."""


def num_blocks_of(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


def keys_of(tokens: Sequence[int]) -> tuple[bytes, ...]:
    """Names of the full blocks of these tokens."""
    return tuple(
        hashlib.blake2b(repr(content).encode(), digest_size=16).digest()
        for content in contents_of(tokens)
        if not len(content) % BLOCK_SIZE
    )


def contents_of(tokens: Sequence[int]) -> list[Content]:
    """Of each full or partial block of these tokens."""
    ends = range(BLOCK_SIZE, len(tokens) + BLOCK_SIZE, BLOCK_SIZE)
    return [tuple(tokens[:end]) for end in ends]


class Memory:
    """The block freed last is handed out first: what is too early or too late meets somebody. What
    is free holds a canary, as if it had been handed out and filled at once."""

    def __init__(self) -> None:
        self.contents: list[Content] = [()] * NUM_BLOCKS
        self.free = list(range(NUM_BLOCKS))
        self.owner: list[str | None] = [None] * NUM_BLOCKS
        """The request that may use a block, with a mark when its use has changed."""
        self.cached: dict[bytes, int] = {}
        """Full blocks whose KV was computed here, or has arrived and counts."""
        self._pins: Counter[int] = Counter()
        self._left: set[int] = set()
        """Pinned blocks that their requests have given back."""
        self._canaries = itertools.count(1)

    def remember(self, blocks: Sequence[int], tokens: Sequence[int]) -> None:
        for key, block in zip(keys_of(tokens), blocks, strict=False):
            self.cached.setdefault(key, block)

    def pin(self, blocks: Iterable[int]) -> None:
        self._pins.update(blocks)

    def unpin(self, blocks: Iterable[int]) -> None:
        self._pins.subtract(blocks)
        free = {block for block in self._left if not self._pins[block]}
        self._left -= free
        self.give_back(sorted(free))

    def take(self, count: int, owner: str) -> list[int] | None:
        if count > len(self.free):
            return None
        taken = [self.free.pop() for _ in range(count)]
        self.change_owner(taken, owner)
        return taken

    def change_owner(self, blocks: Iterable[int], owner: str | None) -> None:
        for block in blocks:
            self.owner[block] = owner

    def give_back(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self._pins[block]:
                self._left.add(block)
                continue
            self.cached = {key: one for key, one in self.cached.items() if one != block}
            self.owner[block] = None
            self.contents[block] = (-next(self._canaries),)
            self.free.append(block)

    def fill(self, blocks: Sequence[int], tokens: Sequence[int], first_block: int = 0) -> None:
        """Computes the KV of these tokens."""
        for block, content in list(zip(blocks, contents_of(tokens), strict=False))[first_block:]:
            self.contents[block] = content

    def holds(self, blocks: Sequence[int], tokens: Sequence[int]) -> bool:
        """The KV of these tokens, which may end within a block that holds more."""
        for position, content in zip(blocks, contents_of(tokens), strict=False):
            if self.contents[position][: len(content)] != content:
                return False
        return True
