"""The engine with its thread, seen from an event loop."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from engine_ext.reference.engine import ReferenceEngine, merge
from engine_ext.reference.messages import GenerateRequest, RequestOutput
from engine_ext.reference.model import Decoder, ForwardBatch
from tests.unit.reference.core.conftest import MakeDriver
from tests.unit.reference.core.harness import FakeConnector, greedy, make_core, prompt, request
from tests.unit.reference.server.fake_engine import until

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


async def collect(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    async with asyncio.timeout(PATIENCE):
        return merge([output async for output in outputs])


async def answer(engine: ReferenceEngine, one: GenerateRequest) -> RequestOutput:
    return await collect(engine.generate(one))


def endless(request_id: str, seed: int = 0) -> GenerateRequest:
    return request(request_id, prompt(20, seed), greedy(400, ignore_eos=True))


async def test_many_callers_get_their_own_answers(start: Start, make_driver: MakeDriver) -> None:
    engine = start()
    some = [request(f"r{i}", prompt(10 + 5 * i, seed=i)) for i in range(12)]
    got = await asyncio.gather(*(answer(engine, one) for one in some))
    expected = make_driver().run(*some)
    assert [(r.request_id, r.token_ids, r.text) for r in got] == [
        (r.request_id, r.token_ids, r.text) for r in expected
    ]
    engine.check_integrity()


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
