"""The block pool under any order of calls."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine_ext.reference.block_manager import BlockManager, IntegrityError, chain_digest

BLOCKS = range(1, 9)


def make_pool() -> BlockManager:
    return BlockManager(num_blocks=len(BLOCKS) + 1, block_size=8, enable_prefix_caching=True)


class PoolMachine(RuleBasedStateMachine):
    """Holders are lists of blocks; contents are named by a chain of small numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool()
        self.holders: list[tuple[list[int], list[bytes]]] = []

    @rule(names=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def hold(self, names: list[int]) -> None:
        digests: list[bytes] = []
        for name in names:
            digests.append(chain_digest(digests[-1] if digests else b"", [name]))
        shared = self.pool.find(digests)
        free = self.pool.num_free
        fresh = self.pool.allocate(len(names) - len(shared), sharing=shared)
        if fresh is None:
            assert self.pool.num_free == free
            return
        assert len({*shared, *fresh}) == len(names)
        assert not any(block in held for block in fresh for held, _ in self.holders)
        self.holders.append(([*shared, *fresh], digests))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        blocks, digests = data.draw(st.sampled_from(self.holders))
        for block, digest in zip(blocks, digests, strict=True):
            self.pool.remember(block, digest)
        assert len(self.pool.find(digests)) == len(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        blocks, digests = data.draw(st.sampled_from(self.holders))
        self.pool.forget(blocks)
        assert not set(self.pool.find(digests)) & set(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        blocks, _ = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.free(blocks)

    @invariant()
    def the_books_are_right(self) -> None:
        held = [blocks for blocks, _ in self.holders]
        self.pool.check_integrity(held)
        assert self.pool.num_free == len(BLOCKS) - len(set().union(*held))


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase


def hold(pool: BlockManager, count: int) -> list[int]:
    blocks = pool.allocate(count)
    assert blocks is not None
    return blocks


def remember_all(pool: BlockManager, blocks: list[int], mark: bytes) -> list[bytes]:
    digests = [mark + bytes([i]) for i in range(len(blocks))]
    for block, digest in zip(blocks, digests, strict=True):
        pool.remember(block, digest)
    return digests


def test_the_least_recently_freed_goes_first_and_of_one_request_its_end() -> None:
    pool = make_pool()
    old, young = hold(pool, 4), hold(pool, 4)
    old_digests, young_digests = remember_all(pool, old, b"o"), remember_all(pool, young, b"y")
    pool.free(old)
    pool.free(young)
    hold(pool, 3)
    assert pool.find(old_digests) == old[:1]
    assert pool.find(young_digests) == young


def test_worthless_blocks_are_used_before_cached_ones() -> None:
    pool = make_pool()
    cached, blank = hold(pool, 4), hold(pool, 4)
    digests = remember_all(pool, cached, b"c")
    pool.free(cached)
    pool.free(blank)
    assert sorted(hold(pool, 4)) == sorted(blank)
    assert pool.find(digests) == cached


def test_blocks_about_to_be_shared_are_not_counted_as_free() -> None:
    pool = make_pool()
    cached = hold(pool, 8)
    digests = remember_all(pool, cached, b"c")
    pool.free(cached)
    found = pool.find(digests[:5])
    assert pool.allocate(4, sharing=found) is None
    assert pool.num_free == 8
    assert pool.allocate(3, sharing=found) is not None


def test_a_block_held_behind_the_books_is_noticed() -> None:
    pool = make_pool()
    block = hold(pool, 1)[0]
    with pytest.raises(IntegrityError):
        pool.check_integrity([])
    with pytest.raises(IntegrityError):
        pool.check_integrity([[block], [block]])
    pool.check_integrity([[block]])


def test_a_digest_names_all_tokens_before_it() -> None:
    def chain(*blocks: list[int]) -> bytes:
        digest = b""
        for block in blocks:
            digest = chain_digest(digest, block)
        return digest

    assert chain([1, 2], [3, 4]) == chain([1, 2], [3, 4])
    assert len({chain([1, 2], [3, 4]), chain([9, 2], [3, 4]), chain([3, 4]), chain([4, 3])}) == 4
