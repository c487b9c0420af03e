"""Who can write to Redis can take reuse away, and nothing else: no engine sees what he wrote."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson
import pytest
from redis import Redis

from router.conversations.conversations import KeepOutcome
from router.conversations.redis_store import NAMESPACE
from router.conversations.store import MAC_BYTES, ValueSigner
from scripts.mock_engine import MockEngine
from tests.redis_server import KEY, RedisServer
from tests.unit.router.conversations.engines import KEPT, decoding, prefilling
from tests.unit.router.conversations.test_turns import AGAIN, ASKED, chat, offered, turns
from tests.unit.router.harness import Router, eventually, running_router, settings_for

pytestmark = pytest.mark.slow  # a Redis server

PLANTED = b"planted"
EVIL = {**KEPT, "remote_host": "planted.example", "remote_engine_id": "planted"}


@pytest.fixture
async def shared(p: MockEngine, d: MockEngine, redis: RedisServer) -> AsyncIterator[Router]:
    p.usual, d.usual = prefilling(), decoding()
    async with running_router(settings_for(p=[p], d=[d], **redis.settings)) as router:
        await eventually(lambda: not router.gateway.fleet.unavailable_roles())
        yield router


def lying(writer: Redis) -> tuple[bytes, bytes]:
    """The one key that is there, and what lies at it."""
    (key,) = writer.keys(NAMESPACE + "*")
    value = writer.get(key)
    assert isinstance(key, bytes)
    assert isinstance(value, bytes)
    return key, value


def entry_of(raw: bytes, **changes: Any) -> bytes:
    return orjson.dumps({**orjson.loads(raw[MAC_BYTES:]), **changes})


def nested(depth: int) -> bytes:
    return b'{"v":1,"params":' + b'{"planted":' * depth + b"1" + b"}" * depth + b"}"


# Of what the router wrote: what is put in its place.
Forgery = Callable[[bytes], bytes]
FORGERIES: dict[str, Forgery] = {
    "nothing": lambda raw: b"",
    "text": lambda raw: PLANTED,
    "bytes": lambda raw: bytes(range(256)),
    "null": lambda raw: b"null",
    "a list": lambda raw: b'["planted"]',
    "cut off": lambda raw: raw[:-1],
    "cut off in its signature": lambda raw: raw[: MAC_BYTES - 1],
    "its signature alone": lambda raw: raw[:MAC_BYTES],
    "unsigned, as it was": lambda raw: raw[MAC_BYTES:],
    "unsigned, other params": lambda raw: entry_of(raw, params=EVIL),
    "its old signature, other params": lambda raw: raw[:MAC_BYTES] + entry_of(raw, params=EVIL),
    "a signature of zeros": lambda raw: b"\0" * MAC_BYTES + entry_of(raw, params=EVIL),
    "signed with another secret": lambda raw: ValueSigner([b"x" * 32]).sign(
        "x", entry_of(raw, params=EVIL)
    ),
    "another version": lambda raw: entry_of(raw, v=2, params=EVIL),
    "a scope that is a list": lambda raw: entry_of(raw, params=EVIL, scope=[]),
    "times that are text": lambda raw: entry_of(raw, params=EVIL, expires_at="9"),
    "no end": lambda raw: entry_of(raw, params=EVIL, expires_at=1e308),
    "a number too large": lambda raw: b'{"v":1,"size":1e999,"planted":' + b"9" * 5000 + b"}",
    "not a number": lambda raw: b'{"v":1,"created_at":NaN,"planted":NaN}',
    "nested": lambda raw: nested(200),
    "nested too deep": lambda raw: nested(100_000),
    "large": lambda raw: PLANTED * 500_000,
}


@pytest.mark.parametrize("name", FORGERIES)
async def test_what_is_forged_reaches_no_engine_and_costs_no_request(
    shared: Router, writer: Redis, p: MockEngine, d: MockEngine, name: str
) -> None:
    await chat(shared, ASKED)
    key, raw = lying(writer)
    writer.set(key, FORGERIES[name](raw))
    await chat(shared, AGAIN)
    assert offered(p) is None
    assert turns(shared, "unverified") == 1
    labels = {"operation": "take", "result": "unverified"}
    assert shared.metric("conversation_store_errors_total", **labels) == 1
    await assert_goes_on(shared, p, d)


@pytest.mark.parametrize("kind", ["list", "set", "hash", "stream"])
async def test_what_is_no_value_of_redis_is_removed_and_no_failure_of_redis(
    shared: Router, writer: Redis, p: MockEngine, d: MockEngine, kind: str
) -> None:
    await chat(shared, ASKED)
    key, _ = lying(writer)
    writer.delete(key)
    make: dict[str, Callable[[], Any]] = {
        "list": lambda: writer.rpush(key, PLANTED),
        "set": lambda: writer.sadd(key, PLANTED),
        "hash": lambda: writer.hset(key, "planted", "planted"),
        "stream": lambda: writer.xadd(key, {"planted": "planted"}),
    }
    make[kind]()
    await chat(shared, AGAIN)
    assert turns(shared, "unverified") == 1
    await assert_goes_on(shared, p, d)


async def assert_goes_on(shared: Router, p: MockEngine, d: MockEngine) -> None:
    """No engine has seen a thing, and the turn after that is reused as ever."""
    await chat(shared, AGAIN)
    assert offered(p)["remote_host"] == KEPT["remote_host"]
    for engine in (p, d):
        assert all(PLANTED not in request.body for request in engine.requests)
    assert shared.metric("conversation_store_errors_total", operation="take", result="failed") == 0


async def test_an_entry_of_another_conversation_is_none_of_this_one(
    shared: Router, writer: Redis, p: MockEngine
) -> None:
    await chat(shared, ASKED, conversation_id="another")
    _, signed = lying(writer)
    writer.flushall()
    await chat(shared, ASKED)
    key, _ = lying(writer)
    writer.set(key, signed)
    await chat(shared, AGAIN)
    assert (offered(p), turns(shared, "unverified")) == (None, 1)


async def test_an_entry_that_was_taken_is_not_taken_again(
    shared: Router, writer: Redis, p: MockEngine
) -> None:
    await chat(shared, ASKED)
    key, signed = lying(writer)
    await chat(shared, AGAIN)
    assert offered(p) == KEPT
    writer.set(key, signed)
    await chat(shared, AGAIN)
    assert (offered(p), turns(shared, "unverified")) == (None, 1)


async def test_a_signed_entry_of_another_version_is_unreadable(
    shared: Router, writer: Redis, p: MockEngine
) -> None:
    await chat(shared, ASKED)
    key, raw = lying(writer)
    place = key.decode().removeprefix(NAMESPACE)
    writer.set(key, ValueSigner([KEY.encode()]).sign(place, entry_of(raw, v=2, params=EVIL)))
    await chat(shared, AGAIN)
    assert (offered(p), turns(shared, "unreadable")) == (None, 1)


async def test_what_was_forged_and_is_replaced_is_no_turn_to_give_up(
    shared: Router, writer: Redis, p: MockEngine, d: MockEngine
) -> None:
    await chat(shared, ASKED)
    key, raw = lying(writer)
    writer.set(key, entry_of(raw, params=EVIL))
    conversations = shared.gateway.conversations
    assert conversations is not None
    turn = conversations.turn_of((), {"model": "m", "messages": ASKED, "conversation_id": "c"})
    assert turn is not None
    assert await conversations.keep(turn, "d:1", KEPT, None, None) == KeepOutcome(True, [])
    (lost,) = (await conversations.keep(turn, "d:1", KEPT, None, None)).unreachable
    assert lost.params == KEPT
    writer.delete(key)
    writer.rpush(key, PLANTED)
    assert await conversations.keep(turn, "d:1", KEPT, None, None) == KeepOutcome(True, [])
    assert lying(writer)[1]
