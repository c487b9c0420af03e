"""An engine that is declared dead takes its legs with it, each once and at once."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from router.http_client.engine_answer import HIGH_WATER, EngineAnswer
from router.http_client.errors import EngineLostError
from router.http_client.pool import EnginePool
from scripts.mock_engine import STREAM_HEAD, MockEngine, chunk
from tests.unit.router.harness import eventually
from tests.unit.router.http_client.asking import (
    LIMIT,
    OK,
    WHOLE,
    ask,
    body_of,
    saying_and_waiting,
    soon,
)
from tests.unit.router.mock_engine import event

BEGUN_STREAM = saying_and_waiting(STREAM_HEAD + chunk(event("a")))
BEGUN_WHOLE = saying_and_waiting(OK + b"content-length: %d\r\n\r\n" % LIMIT + b" " * HIGH_WATER * 2)
LOST = EngineLostError("three probes failed")


class Client:
    """A sink that may do something at each write."""

    def __init__(self, then: Callable[[], None] | None = None) -> None:
        self.got: list[tuple[bytes, bool]] = []
        self._then = then

    def write(self, block: bytes, last: bool) -> None:
        self.got.append((block, last))
        if self._then is not None:
            self._then()


async def relay(answer: EngineAnswer, client: Client) -> None:
    await answer.relay(client, 10, soon())


async def read_until_never(answer: EngineAnswer) -> None:
    await answer.peek_until(lambda _: False)


@pytest.fixture
async def gone(pool: EnginePool) -> Callable[[], Any]:
    """That nothing of the pool is left."""
    return lambda: eventually(lambda: pool.open_count == pool.idle_count == 0)


async def test_a_leg_that_waits_fails_at_once(
    pool: EnginePool, engine: MockEngine, gone: Any
) -> None:
    engine.scripts = [saying_and_waiting(b"")] * 3
    legs = [asyncio.create_task(ask(pool)) for _ in range(3)]
    await eventually(lambda: len(engine.requests) == 3)
    pool.fail_legs(LOST)
    errors = await asyncio.gather(*legs, return_exceptions=True)
    assert [(type(error), str(error)) for error in errors] == [(EngineLostError, str(LOST))] * 3
    assert len({id(error) for error in errors} | {id(LOST)}) == 4, "each has one of its own"
    await gone()


@pytest.mark.parametrize(
    ("script", "reading"),
    [
        (BEGUN_WHOLE, lambda answer: answer.read(LIMIT)),
        (BEGUN_STREAM, lambda answer: answer.read(LIMIT)),
        (BEGUN_STREAM, read_until_never),
        (BEGUN_STREAM, lambda answer: relay(answer, Client())),
        (BEGUN_WHOLE, lambda answer: relay(answer, Client())),
    ],
    ids=["whole", "stream-read-whole", "until", "relay", "relay-whole"],
)
@pytest.mark.parametrize("is_under_way", [True, False])
async def test_a_leg_that_is_read_fails_at_once(
    pool: EnginePool, engine: MockEngine, gone: Any, script: Any, reading: Any, is_under_way: bool
) -> None:
    engine.scripts = [script]
    answer = await ask(pool)
    task = asyncio.ensure_future(reading(answer)) if is_under_way else None
    await asyncio.sleep(0)  # it waits
    pool.fail_legs(LOST)
    with pytest.raises(EngineLostError):
        await (task or reading(answer))
    answer.close()
    await gone()


async def test_a_relayed_leg_has_passed_on_what_came_before(
    pool: EnginePool, engine: MockEngine
) -> None:
    engine.scripts = [BEGUN_STREAM]
    answer, client = await ask(pool), Client()
    pool.fail_legs(LOST)
    with pytest.raises(EngineLostError):
        await relay(answer, client)
    assert client.got == [(event("a"), False)]


async def test_a_leg_whose_client_does_not_read_fails_too(
    pool: EnginePool, engine: MockEngine, gone: Any
) -> None:
    engine.scripts = [BEGUN_STREAM]
    answer = await ask(pool)
    relaying = asyncio.create_task(relay(answer, Client(answer.pause)))
    await asyncio.sleep(0)  # it waits
    pool.fail_legs(LOST)
    with pytest.raises(EngineLostError):
        await relaying
    answer.resume()
    await gone()


async def test_idle_connections_are_dropped_and_new_requests_work(
    pool: EnginePool, engine: MockEngine, gone: Any
) -> None:
    engine.scripts = [saying_and_waiting(WHOLE)]
    await body_of(pool)
    assert pool.idle_count == 1
    pool.fail_legs(LOST)
    assert pool.idle_count == 0
    await gone()
    assert await body_of(pool)
    assert engine.last.connection == 2


@pytest.mark.parametrize(
    "data",
    [WHOLE, OK + b"connection: close\r\ncontent-length: 2\r\n\r\n{}"],
    ids=["kept", "closed"],
)
async def test_a_complete_answer_does_not_fail(
    pool: EnginePool, engine: MockEngine, gone: Any, data: bytes
) -> None:
    engine.scripts = [saying_and_waiting(data)]
    answer = await ask(pool)
    pool.fail_legs(LOST)
    answer.raise_if_failed()
    assert await answer.read(LIMIT) == b"{}"
    await gone()


async def test_an_answer_that_ended_and_is_read_next_is_not_touched(
    pool: EnginePool, engine: MockEngine
) -> None:
    """Its end is here, and its reader has not run yet."""
    engine.scripts = [saying_and_waiting(WHOLE)]
    asking = asyncio.create_task(body_of(pool))
    await eventually(lambda: pool.reads)
    pool.fail_legs(LOST)
    assert await asking == b"{}"


@pytest.mark.parametrize("ends", [False, True])
async def test_a_callback_of_an_answer_may_fail_all_legs(
    pool: EnginePool, engine: MockEngine, gone: Any, ends: bool
) -> None:
    """In the first write, which `relay` makes, and in one that the connection makes."""
    rest = asyncio.Event()

    async def script(request: Any, peer: Any) -> None:
        await peer.send(STREAM_HEAD + chunk(event("a")))
        await rest.wait()
        await peer.send(chunk(event("b")) + (b"0\r\n\r\n" if ends else b""))
        await peer.wait_left()

    engine.scripts = [script]
    answer = await ask(pool)
    client = Client(lambda: pool.fail_legs(LOST) if len(client.got) == 2 else None)
    relaying = asyncio.create_task(relay(answer, client))
    await asyncio.sleep(0)  # it has written the first
    rest.set()
    if ends:
        await relaying
    else:
        with pytest.raises(EngineLostError):
            await relaying
    assert client.got == [(event("a"), False), (event("b"), ends)]
    answer.close()
    await gone()


async def test_a_relays_first_write_may_fail_all_legs(
    pool: EnginePool, engine: MockEngine, gone: Any
) -> None:
    engine.scripts = [BEGUN_STREAM]
    answer = await ask(pool)
    client = Client(lambda: pool.fail_legs(LOST))
    with pytest.raises(EngineLostError):
        await relay(answer, client)
    assert len(client.got) == 1
    await gone()


async def test_the_first_reason_counts(pool: EnginePool, engine: MockEngine, gone: Any) -> None:
    engine.scripts = [BEGUN_STREAM]
    answer = await ask(pool)
    pool.fail_legs(EngineLostError("first"))
    pool.fail_legs(EngineLostError("second"))
    await gone()  # and the connection's own end is no reason either
    with pytest.raises(EngineLostError, match="first"):
        answer.raise_if_failed()


async def test_a_leg_that_was_given_up_is_not_failed(
    pool: EnginePool, engine: MockEngine, gone: Any
) -> None:
    engine.scripts = [BEGUN_STREAM]
    answer = await ask(pool)
    answer.close()
    pool.fail_legs(LOST)
    answer.raise_if_failed()
    await gone()
