"""What others wrote into a store is not believed: forged, altered, moved, or put back."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Counter

from router.conversations.store import (
    MAC_BYTES,
    MAX_VALUE_BYTES,
    MemoryStore,
    SignedStore,
    UnverifiedError,
    ValueSigner,
)
from tests.unit.router.conversations.test_stores import Clock
from tests.unit.router.harness import count_of

OLD, NEW = b"an old key of 24 bytes..", b"a new key of 24 bytes..."


class Desk:
    """A store that others can write to, and one of ours before it."""

    def __init__(self, *keys: bytes, shared: MemoryStore | None = None) -> None:
        self.shared = MemoryStore(100, 10**9) if shared is None else shared
        self.clock = Clock()
        self.errors = Counter("errors", "", ("operation", "result"), registry=None)
        signer = ValueSigner(keys or (NEW,))
        self.store = SignedStore(self.shared, signer, self.errors, 450, self.clock)

    def unverified(self, operation: str) -> float:
        return count_of(self.errors, operation, "unverified")

    def sealed(self, key: str, value: bytes) -> bytes:
        """As another router with our key would have put it."""
        return ValueSigner([NEW]).sign(key, value)

    async def refuses(self, key: str, raw: bytes) -> None:
        before = self.unverified("take")
        await self.shared.put(key, raw, 10)
        with pytest.raises(UnverifiedError):
            await self.store.take(key)
        assert self.unverified("take") == before + 1
        assert await self.store.take(key) is None, "and it is gone"


async def test_another_router_with_the_key_takes_it_and_one_without_does_not() -> None:
    desk = Desk()
    await desk.store.put("k", b"value", 10)
    assert await Desk(NEW, shared=desk.shared).store.take("k") == b"value"
    await desk.store.put("k", b"value", 10)
    with pytest.raises(UnverifiedError):
        await Desk(OLD, shared=desk.shared).store.take("k")


async def test_the_first_key_signs_and_every_key_verifies() -> None:
    shared = MemoryStore(9, 10**6)
    rolled = Desk(NEW, OLD, shared=shared)
    await Desk(OLD, shared=shared).store.put("k", b"old", 10)
    assert await rolled.store.take("k") == b"old"
    await rolled.store.put("k", b"new", 10)
    assert await Desk(NEW, shared=shared).store.take("k") == b"new"


@given(st.binary(max_size=80), st.integers(0), st.integers(0, 255), st.integers(0, 120))
async def test_not_a_bit_may_be_changed(value: bytes, at: int, byte: int, end: int) -> None:
    desk = Desk()
    sealed = desk.sealed("k", value)
    changed = bytearray(sealed)
    changed[at % len(changed)] = byte
    for raw in (bytes(changed), sealed[:end], sealed + b"x", value, b"\0" * MAC_BYTES + value):
        if raw != sealed:
            await desk.refuses("k", raw)


@given(st.text("abc"), st.text("abc"), st.binary(max_size=5))
async def test_it_is_worth_nothing_at_another_key(one: str, other: str, value: bytes) -> None:
    desk = Desk()
    if one != other:
        await desk.refuses(other, desk.sealed(one, value))


async def test_key_and_value_cannot_lend_each_other_bytes() -> None:
    desk = Desk()
    sealed = desk.sealed("key", b"value")
    await desk.refuses("keyv", sealed.replace(b"value", b"alue"))
    await desk.refuses("ke", sealed.replace(b"value", b"yvalue"))


async def test_what_was_taken_cannot_be_put_back_while_it_is_valid() -> None:
    desk = Desk()
    sealed = desk.sealed("k", b"value")
    await desk.shared.put("k", sealed, 10)
    assert await desk.store.take("k") == b"value"
    await desk.refuses("k", sealed)
    desk.clock.now += 449
    await desk.refuses("k", sealed)
    await desk.shared.put("k", sealed, 10)
    assert await desk.store.put("k", b"newer", 10) == [], "nor is anybody told to give it up"


async def test_what_was_taken_is_remembered_no_longer_than_it_could_be_used() -> None:
    desk = Desk()
    for number in range(100):
        await desk.store.put("k", b"%d" % number, 10)
        await desk.store.take("k")
        desk.clock.now += 45
    assert len(desk.store._taken) == 10


async def test_only_what_is_ours_is_said_to_have_been_replaced() -> None:
    desk = Desk()
    await desk.shared.put("k", b"forged", 10)
    assert await desk.store.put("k", b"one", 10) == []
    assert desk.unverified("put") == 1
    assert await desk.store.put("k", b"two", 10) == [b"one"]
    assert desk.unverified("put") == 1


async def test_what_is_too_large_is_neither_put_nor_believed() -> None:
    desk = Desk()
    large = b"x" * (MAX_VALUE_BYTES + 1)
    assert await desk.store.put("k", large, 10) == [large]
    assert await desk.store.take("k") is None
    await desk.refuses("k", ValueSigner([NEW]).sign("k", large))


async def test_a_thousand_forgeries_are_one_line_and_show_no_key(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    desk = Desk()
    for _ in range(1000):
        await desk.refuses("k", b"forged")
    (record,) = caplog.records
    assert "--conversation-store-key" in record.getMessage()
    assert NEW.decode() not in caplog.text
    assert desk.unverified("take") == 1000


async def test_what_is_read_stays_and_is_believed_no_more_than_what_is_taken() -> None:
    desk = Desk()
    await desk.store.put("k", b"value", 10)
    assert [await desk.store.read("k") for _ in range(3)] == [b"value"] * 3
    await desk.shared.put("k", desk.sealed("another", b"value"), 10)
    with pytest.raises(UnverifiedError):
        await desk.store.read("k")
    assert desk.unverified("read") == 1
    assert await desk.store.read("nothing") is None
