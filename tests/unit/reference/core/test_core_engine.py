"""The engine with its thread, seen from an event loop."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from engine_ext.common.orders import StepMetadata
from engine_ext.reference.config import EngineConfig
from engine_ext.reference.engine import ReferenceEngine, merge
from engine_ext.reference.host import build_engine
from engine_ext.reference.messages import GenerateRequest, RequestOutput
from engine_ext.reference.model import Decoder, ForwardBatch
from tests.unit.reference.core.conftest import MakeDriver
from tests.unit.reference.core.harness import (
    BLOCK,
    FakeConnector,
    FakeWorker,
    greedy,
    make_core,
    prompt,
    request,
)

PATIENCE = 20.0
"""Seconds a condition may take on a busy machine."""
Start = Callable[..., ReferenceEngine]


@pytest.fixture
def start(model_dir: Path, decoder: Decoder) -> Iterator[Start]:
    engines: list[ReferenceEngine] = []

    def start_engine(connector: FakeConnector | None = None, **changes: Any) -> ReferenceEngine:
        connect = (lambda *_: connector) if connector else None
        changes.setdefault("model", decoder)
        engines.append(ReferenceEngine(make_core(model_dir, connect=connect, **changes)))
        return engines[-1]

    yield start_engine
    for engine in engines:
        engine.shutdown(PATIENCE)
        engine.check_integrity()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110  what it waits for happens in another thread
            await asyncio.sleep(0.001)


async def collect(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    async with asyncio.timeout(PATIENCE):
        return merge([output async for output in outputs])


async def answer(engine: ReferenceEngine, one: GenerateRequest) -> RequestOutput:
    return await collect(engine.generate(one))


def endless(request_id: str, seed: int = 0) -> GenerateRequest:
    return request(request_id, prompt(20, seed), greedy(400, ignore_eos=True))


def engine_cpu_seconds() -> float:
    (ident,) = (t.ident for t in threading.enumerate() if t.name == "engine")
    assert ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(ident))


async def test_many_callers_get_their_own_answers(start: Start, make_driver: MakeDriver) -> None:
    engine = start()
    some = [request(f"r{i}", prompt(10 + 5 * i, seed=i)) for i in range(12)]
    got = await asyncio.gather(*(answer(engine, one) for one in some))
    expected = make_driver().run(*some)
    assert [(r.request_id, r.token_ids, r.text) for r in got] == [
        (r.request_id, r.token_ids, r.text) for r in expected
    ]
    engine.check_integrity()


async def test_an_engine_is_built_from_a_directory(model_dir: Path, start: Start) -> None:
    engine = build_engine(EngineConfig(model=model_dir, num_blocks=20, num_threads=1))
    try:
        built = await answer(engine, request("a", prompt(40)))
        assert built.token_ids == (await answer(start(), request("a", prompt(40)))).token_ids
        assert engine.stats().num_blocks_total == 19, "block 0 is never handed out"
        assert engine.is_healthy
    finally:
        engine.shutdown(PATIENCE)


async def test_tokens_come_as_they_are_made(start: Start) -> None:
    engine = start()
    async with aclosing(engine.generate(endless("a"))) as outputs:
        async for output in outputs:
            assert output.finish_reason is None
            assert output.token_ids
            break
    await until(lambda: engine.stats().num_running == 0)


async def test_closing_the_iterator_aborts_and_frees(start: Start) -> None:
    connector = FakeConnector()
    engine = start(connector)
    outputs = engine.generate(endless("a"))
    await anext(outputs)
    await outputs.aclose()
    await until(lambda: engine.stats().requests_finished == {"abort": 1})
    assert engine.stats().num_blocks_free == engine.stats().num_blocks_total
    assert "request_finished a aborted" in connector.calls


async def test_cancelling_the_consumer_aborts_and_frees(start: Start) -> None:
    engine = start()
    task = asyncio.create_task(answer(engine, endless("a")))
    await until(lambda: engine.stats().num_running == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: engine.stats().num_running == 0)
    assert engine.stats().num_blocks_free == engine.stats().num_blocks_total


@pytest.mark.parametrize("taken", [True, False])
async def test_what_an_answer_that_nobody_took_would_keep_for_others_is_revoked(
    start: Start, taken: bool
) -> None:
    connector = FakeConnector()
    connector.scheduler.held.add("p")
    engine = start(connector)
    outputs = engine.generate(request("p", prompt(20), greedy(1)))
    assert (await anext(outputs)).finish_reason == "length"
    if taken:
        assert [output async for output in outputs] == []
    await outputs.aclose()
    await answer(engine, request("later", prompt(5), greedy(1)))
    assert ("revoke p" in connector.calls) is not taken


async def test_an_abort_by_id_ends_the_stream(start: Start) -> None:
    engine = start()
    task = asyncio.create_task(answer(engine, endless("a")))
    await until(lambda: engine.stats().num_running == 1)
    engine.abort("unknown")
    engine.abort("a")
    result = await task
    assert result.finish_reason == "abort"


async def test_a_slow_consumer_gets_everything(start: Start) -> None:
    engine = start()
    outputs = engine.generate(endless("slow"))
    first = await anext(outputs)
    await until(lambda: engine.stats().requests_finished.get("length") == 1)
    rest = [output async for output in outputs]
    assert len(merge([first, *rest]).token_ids) == 400


async def test_an_engine_that_only_waits_uses_no_cpu(start: Start) -> None:
    connector = FakeConnector()
    stepped = threading.Event()

    class WatchedWorker(FakeWorker):
        def start_load_kv(self, meta: StepMetadata) -> None:
            stepped.set()

    connector.worker = WatchedWorker(connector.calls)
    connector.scheduler.external["d"] = 50
    connector.scheduler.held.add("p")
    engine = start(connector)
    await answer(engine, request("p", prompt(20, seed=1), greedy(1)))
    task = asyncio.create_task(answer(engine, request("d", prompt(50))))
    await until(lambda: engine.stats().num_waiting_for_remote_kv == 1)
    assert engine.stats().num_blocks_delayed > 0

    before = engine_cpu_seconds()
    for _ in range(3):  # Whatever was under way may end; from then on nothing may start.
        stepped.clear()
        if not await asyncio.to_thread(stepped.wait, 0.5):
            break
    else:
        pytest.fail("the engine steps although nothing happens")
    assert engine_cpu_seconds() - before < 0.1

    connector.worker.report(received=["d"], sent=["p"])
    assert (await task).finish_reason in ("stop", "length")
    await until(lambda: engine.stats().num_blocks_delayed == 0)


async def test_a_wake_is_answered_long_before_the_backstop(start: Start) -> None:
    connector = FakeConnector()
    engine = start(connector)
    for i in range(5):
        connector.scheduler.external[f"d{i}"] = 20
        task = asyncio.create_task(answer(engine, request(f"d{i}", prompt(20, seed=i), greedy(1))))
        await until(lambda: engine.stats().num_waiting_for_remote_kv == 1)
        started = time.monotonic()
        connector.worker.report(received=[f"d{i}"])
        await task
        if time.monotonic() - started < 0.5:
            return
    pytest.fail("five wakes took half a second or more")


async def test_blocked_requests_do_not_spin(start: Start) -> None:
    connector = FakeConnector()
    connector.scheduler.held.add("p")
    engine = start(connector, num_blocks=9)
    await answer(engine, request("p", prompt(7 * BLOCK), greedy(1)))
    task = asyncio.create_task(answer(engine, request("a", prompt(4 * BLOCK, seed=1), greedy(1))))
    await until(lambda: engine.stats().num_waiting == 1)
    before = engine_cpu_seconds()
    done, _ = await asyncio.wait([task], timeout=0.5)
    assert not done
    assert engine_cpu_seconds() - before < 0.1
    connector.worker.report(sent=["p"])
    assert (await task).finish_reason == "length"


async def test_asking_again_is_soon_and_cheap(start: Start) -> None:
    connector = FakeConnector()
    connector.scheduler.external["later"] = None
    engine = start(connector)
    task = asyncio.create_task(answer(engine, request("later", prompt(10), greedy(1))))
    await until(lambda: engine.stats().num_waiting == 1)
    before, asked = engine_cpu_seconds(), len(connector.calls)
    for _ in range(5):  # the machine may have stood still meanwhile
        done, _ = await asyncio.wait([task], timeout=0.5)
        assert not done
        if len(connector.calls) > asked:
            break
    assert len(connector.calls) > asked
    assert engine_cpu_seconds() - before < 0.1
    connector.scheduler.external["later"] = 0
    assert (await task).finish_reason == "length"


async def test_shutdown_ends_every_stream_and_then_refuses(start: Start) -> None:
    connector = FakeConnector()
    engine = start(connector)
    task = asyncio.create_task(answer(engine, endless("a")))
    await until(lambda: engine.stats().num_running == 1)
    await asyncio.to_thread(engine.shutdown, PATIENCE)
    assert (await task).finish_reason in ("abort", "length")
    assert connector.was_shut_down
    assert not engine.is_healthy
    assert (await answer(engine, request("b", prompt(5)))).finish_reason == "error"
    engine.shutdown(PATIENCE)


async def test_a_dead_thread_leaves_nobody_waiting(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    class Panic(BaseException):
        pass

    class Panicking:
        def forward(self, batch: ForwardBatch, layers: Sequence[Tensor]) -> Tensor:
            raise Panic("planted")

    engine = start(model=Panicking())
    assert (await answer(engine, request("a", prompt(5)))).finish_reason == "error"
    await until(lambda: not engine.is_healthy)
    assert "planted" in caplog.text
    assert (await answer(engine, request("b", prompt(5)))).finish_reason == "error"


async def test_a_step_that_never_ends_is_reported_by_shutdown(
    start: Start, decoder: Decoder
) -> None:
    entered, release = threading.Event(), threading.Event()

    class Stuck:
        def forward(self, batch: ForwardBatch, layers: Sequence[Tensor]) -> Tensor:
            entered.set()
            assert release.wait(PATIENCE)
            return decoder.forward(batch, layers)

    engine = start(model=Stuck())
    task = asyncio.create_task(answer(engine, request("a", prompt(5))))
    await until(entered.is_set)
    with pytest.raises(TimeoutError, match="step"):
        engine.shutdown(0.01)
    release.set()
    assert (await task).finish_reason == "abort"


def test_streams_of_a_closed_loop_do_no_harm(start: Start) -> None:
    engine = start()

    async def leave() -> None:
        outputs = engine.generate(endless("a"))
        await anext(outputs)
        keep.append(outputs)

    keep: list[Any] = []
    asyncio.run(leave())
    result = asyncio.run(answer(engine, request("b", prompt(10))))
    assert result.finish_reason in ("stop", "length")
    assert engine.is_healthy
