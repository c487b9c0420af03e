"""Engine limits, the admission queue, and the limits of the server, on real sockets."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from router.server.client_connection import MAX_EXCESS_CONNECTIONS
from scripts.mock_engine import DONE, MockEngine, Peer, Received
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import (
    answering,
    reset,
    streaming_until,
    usual_decode,
    usual_prefill,
)
from tests.unit.router.harness import Router, eventually, post
from tests.unit.router.mock_engine import PARAMS, USUAL, event, running_engine
from tests.unit.router.processes import serving_router


class Gate:
    """An engine that answers when the test lets it, and counts the requests that it holds."""

    def __init__(self) -> None:
        self.held = 0
        self.most = 0
        self.most_bytes = 0
        self._bytes = 0
        self._opened = asyncio.Semaphore(0)

    def let(self, count: int) -> None:
        for _ in range(count):
            self._opened.release()

    async def __call__(self, request: Received, peer: Peer) -> None:
        self.held += 1
        self._bytes += len(request.json["prompt"])
        self.most, self.most_bytes = max(self.most, self.held), max(self.most_bytes, self._bytes)
        try:
            await self._opened.acquire()
        finally:
            self.held -= 1
            self._bytes -= len(request.json["prompt"])
        if request.json["max_tokens"] == 1:
            await usual_prefill(request, peer)
        else:
            await usual_decode(request, peer)


@contextlib.asynccontextmanager
async def asking(
    router: Router, count: int, wait: int | None = None, **asked: Any
) -> AsyncIterator[list[asyncio.Task[httpx.Response]]]:
    """Send `count` requests, and yield their tasks once `wait` of them are queued."""
    depth = depth_of(router)  # when it is entered
    headers = asked.pop("headers", {})
    body = {"model": "m", "prompt": "hello", "max_tokens": 7} | asked
    made = [
        asyncio.create_task(router.client.post("/v1/completions", json=body, headers=headers))
        for _ in range(count)
    ]
    expected = count if wait is None else wait
    try:
        await eventually(lambda: depth_of(router) == depth + expected)
        yield made
    finally:
        await asyncio.gather(*made, return_exceptions=True)


def depth_of(router: Router) -> int:
    assert router.gateway.admission is not None
    return router.gateway.admission.depth


def order_of(engine: MockEngine, header: str) -> list[str | None]:
    return [request.header(header) for request in engine.requests]


def by(tenant: str, **more: str) -> dict[str, str]:
    return {"authorization": tenant, **more}


async def test_engine_limits_hold_under_a_flood_of_requests(
    start_router: StartRouter, d2: MockEngine
) -> None:
    async with (
        running_engine(usual_prefill) as p1,
        running_engine(usual_prefill) as p2,
        running_engine(usual_decode) as d1,
    ):
        engines, gates = [p1, p2, d1, d2], [Gate() for _ in range(4)]
        for engine, gate in zip(engines, gates, strict=True):
            engine.usual = gate
            gate.let(100)
        router = await start_router(ps=[p1, p2], ds=[d1, d2], max_engine_requests=3)
        answers = await asyncio.gather(*(router.complete() for _ in range(60)))
        assert {answer.status_code for answer in answers} == {200}
        assert max(gate.most for gate in gates) <= 3
        assert router.metric("queue_seconds_count")


async def test_slot_at_decoder_is_reserved_while_the_prefill_leg_runs(
    start_router: StartRouter, p: MockEngine
) -> None:
    p.usual = gate = Gate()
    router = await start_router(max_engine_requests=2)
    async with asking(router, 6, wait=4):
        await eventually(lambda: gate.held == 2)
        gate.let(6)
    assert gate.most == 2


async def test_prompts_beyond_the_token_limit_wait_and_the_largest_one_runs_alone(
    start_router: StartRouter, p: MockEngine
) -> None:
    p.usual = gate = Gate()
    router = await start_router(max_engine_requests=0, max_engine_prefill_tokens=1000)
    large = asking(router, 2, prompt="y" * 40_000)
    async with asking(router, 8, wait=4, prompt="x" * 900), large:
        gate.let(10)
    assert gate.most_bytes == 40_000


async def test_request_goes_to_an_engine_with_room(
    start_router: StartRouter, d: MockEngine, d2: MockEngine
) -> None:
    d.usual = gate = Gate()
    router = await start_router(ds=[d, d2], max_engine_requests=1)
    first = asyncio.create_task(router.complete())
    await eventually(lambda: gate.held == 1)
    for _ in range(5):
        assert (await router.complete()).status_code == 200
    gate.let(1)
    assert (await first).status_code == 200
    assert len(d.requests) == 1
    assert not router.metric("queue_seconds_count")


async def test_slot_at_prefiller_is_released_while_the_decoder_answers(
    start_router: StartRouter, d: MockEngine, d2: MockEngine
) -> None:
    d.usual, d2.usual = (gates := [Gate(), Gate()])
    router = await start_router(ds=[d, d2], max_engine_requests=1)
    answers = [asyncio.create_task(router.complete()) for _ in range(2)]
    await eventually(lambda: all(gate.held for gate in gates))
    for gate in gates:
        gate.let(1)
    assert {answer.status_code for answer in await asyncio.gather(*answers)} == {200}


async def test_slot_at_prefiller_is_released_if_decode_first_succeeds(
    start_router: StartRouter, d: MockEngine, d2: MockEngine
) -> None:
    left = asyncio.Event()
    d.usual = d2.usual = streaming_until(left, event("a"), DONE)
    router = await start_router(ds=[d, d2], max_engine_requests=1)
    answers = [asyncio.create_task(router.stream(cache_hit_threshold=0.5)) for _ in range(2)]
    await eventually(lambda: d.requests and d2.requests)
    left.set()
    assert {answer.status_code for answer in await asyncio.gather(*answers)} == {200}


async def test_engine_that_returns_admits_queued_requests(
    start_router: StartRouter, d: MockEngine, d2: MockEngine
) -> None:
    d.usual, d2.healthy = (gate := Gate()), False
    router = await start_router(ds=[d, d2], max_engine_requests=1)
    first = asyncio.create_task(router.complete())
    await eventually(lambda: gate.held)
    async with asking(router, 1) as [waiting]:
        d2.healthy = True
        assert (await waiting).status_code == 200
    gate.let(1)
    assert (await first).status_code == 200


async def test_queued_request_fails_when_the_last_engine_dies(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    d.usual = gate = Gate()
    router = await start_router(max_engine_requests=1)
    first = asyncio.create_task(router.complete())
    await eventually(lambda: gate.held)
    async with asking(router, 3) as waiting:
        d.healthy = p.healthy = False
        answers = await asyncio.gather(*waiting)
    assert {answer.status_code for answer in answers} == {503}
    gate.let(1)
    assert (await first).status_code == 200


async def test_slot_moves_to_another_engine_after_a_failed_leg(
    start_router: StartRouter, d: MockEngine, d2: MockEngine
) -> None:
    d.usual = reset
    router = await start_router(ds=[d, d2], max_engine_requests=2)
    for _ in range(4):
        assert (await router.complete()).status_code == 200


async def test_tenants_take_turns_in_the_queue(start_router: StartRouter, d: MockEngine) -> None:
    d.usual = gate = Gate()
    router = await start_router(max_engine_requests=1)
    modest = asking(router, 4, headers=by("modest"))
    async with asking(router, 21, wait=20, headers=by("flood")), modest:
        gate.let(25)
    order = order_of(d, "authorization")
    assert len(order) == 25
    assert order[1:9].count("modest") == 4


async def test_lower_priority_values_go_first_and_header_takes_precedence(
    start_router: StartRouter, d: MockEngine
) -> None:
    d.usual = gate = Gate()
    router = await start_router(max_engine_requests=1)
    high = {"x-vllm-priority": "-3", "x-who": "header"}
    async with (
        asking(router, 1, wait=0, headers={"x-who": "running"}),
        asking(router, 1, headers={"x-who": "usual"}),
        asking(router, 1, headers={"x-who": "later"}, priority=2),
        asking(router, 1, headers={"x-who": "sooner"}, priority=-2),
        asking(router, 1, headers=high, priority=9),
        asking(router, 1, headers={"x-who": "nonsense"}, priority="high"),
    ):
        gate.let(6)
    expected = ["running", "header", "sooner", "usual", "nonsense", "later"]
    assert order_of(d, "x-who") == expected


async def test_priorities_can_be_disabled(start_router: StartRouter, d: MockEngine) -> None:
    d.usual = gate = Gate()
    router = await start_router(max_engine_requests=1, queue_priorities=False)
    async with (
        asking(router, 1, wait=0, headers={"x-who": "1"}),
        asking(router, 1, headers={"x-who": "2"}),
        asking(router, 1, headers={"x-who": "3"}, priority=-9),
    ):
        gate.let(3)
    assert order_of(d, "x-who") == ["1", "2", "3"]


def check_refusal(answer: httpx.Response, status: int, router: Router, reason: str) -> None:
    assert answer.status_code == status
    assert int(answer.headers["retry-after"]) >= 1
    error = answer.json()["error"]
    assert error["code"] == status
    kinds = {429: "RateLimitError", 503: "ServiceUnavailableError"}
    assert error["type"] == kinds[status]
    assert router.metric("refusals_total", reason=reason) >= 1


async def test_request_without_room_is_rejected_at_once_if_there_is_no_queue(
    start_router: StartRouter, d: MockEngine
) -> None:
    d.usual = gate = Gate()
    router = await start_router(max_engine_requests=1, queue_size=0)
    async with asking(router, 1, wait=0):
        await eventually(lambda: gate.held)
        check_refusal(await router.complete(), 503, router, "no_queue")
        gate.let(1)


async def test_full_queue_rejects_the_tenant_that_exceeds_its_share(
    start_router: StartRouter, d: MockEngine
) -> None:
    d.usual = gate = Gate()
    router = await start_router(max_engine_requests=1, queue_size=4)
    async with asking(router, 5, wait=4, headers=by("flood")) as flood:
        alone = await router.client.post("/v1/completions", json={}, headers=by("flood"))
        check_refusal(alone, 503, router, "queue_full")
        async with asking(router, 1, wait=0, headers=by("modest")) as [modest]:
            await eventually(lambda: any(task.done() for task in flood))
            pushed_out = next(task.result() for task in flood if task.done())
            check_refusal(pushed_out, 429, router, "tenant_share")
            again = await router.client.post("/v1/completions", json={}, headers=by("flood"))
            check_refusal(again, 429, router, "tenant_share")
            assert router.metric("queue_depth") == 4
            gate.let(5)
        assert modest.result().status_code == 200


async def test_higher_priority_displaces_a_lower_one_in_a_full_queue(
    start_router: StartRouter, d: MockEngine
) -> None:
    d.usual = gate = Gate()
    router = await start_router(max_engine_requests=1, queue_size=1)
    async with asking(router, 1, wait=0):
        await eventually(lambda: gate.held)
        async with (
            asking(router, 1, priority=5) as [low],
            asking(router, 1, wait=0, priority=1) as [high],
        ):
            check_refusal(await low, 503, router, "outranked")
            gate.let(2)
        assert high.result().status_code == 200


async def test_queue_timeout_rejects_the_request_and_keeps_the_connection(
    start_router: StartRouter, d: MockEngine
) -> None:
    d.usual = gate = Gate()
    router = await start_router(max_engine_requests=1, queue_timeout=0.2)
    async with asking(router, 1, wait=0), router.socket() as client:
        await eventually(lambda: gate.held)
        asked = post(b'{"prompt": "x", "max_tokens": 2}')
        await client.send(asked)
        head, body = await client.answer()
        assert head.startswith(b"HTTP/1.1 503")
        assert b"\r\nretry-after: 1\r\n" in head
        assert b"ServiceUnavailableError" in body
        gate.let(2)
        await eventually(lambda: not gate.held)
        await client.send(asked)
        assert (await client.head()).startswith(b"HTTP/1.1 200")
    assert router.metric("refusals_total", reason="queue_timeout") == 1


async def test_disconnected_client_leaves_the_queue(
    start_router: StartRouter, d: MockEngine
) -> None:
    d.usual = gate = Gate()
    router = await start_router(max_engine_requests=1)
    async with asking(router, 1, wait=0):
        await eventually(lambda: gate.held)
        async with router.socket() as client:
            await client.send(post(b'{"prompt": "left", "max_tokens": 2}'))
            await eventually(lambda: depth_of(router) == 1)
        await eventually(lambda: depth_of(router) == 0)
        async with asking(router, 1):
            gate.let(2)
    assert [request.json["prompt"] for request in d.requests] == ["hello", "hello"]
    assert router.metric("client_disconnects_total", stage="queue") == 1


@pytest.mark.slow
async def test_client_that_disconnects_when_admitted_releases_its_slot(
    start_router: StartRouter, d: MockEngine
) -> None:
    d.usual = gate = Gate()
    router = await start_router(max_engine_requests=1)
    gateway = router.gateway
    async with asking(router, 1, wait=0):
        await eventually(lambda: gate.held)
        before = set(gateway.tasks.running)
        async with asking(router, 1):
            [waiting] = gateway.tasks.running - before
            [first] = before
            first.add_done_callback(lambda _: waiting.cancel())
            async with asking(router, 1) as [third]:
                gate.let(3)
                assert (await third).status_code == 200


async def test_conversation_entry_is_not_taken_while_the_turn_is_queued(
    start_router: StartRouter, d: MockEngine
) -> None:
    d.scripts = [answering(200, USUAL | {"kv_transfer_params": PARAMS})]
    router = await start_router(max_engine_requests=1)
    assert (await router.complete(conversation_id="c")).status_code == 200
    assert router.metric("conversation_entries") == 1
    d.usual = gate = Gate()
    async with asking(router, 1, wait=0):
        await eventually(lambda: gate.held)
        async with asking(router, 1, conversation_id="c") as [turn]:
            assert router.metric("conversation_entries") == 1
            turn.cancel()
            await eventually(lambda: depth_of(router) == 0)
            assert router.metric("conversation_entries") == 1
        gate.let(1)


@pytest.mark.slow
@pytest.mark.parametrize("ends", [True, False])
async def test_shutdown_serves_or_rejects_queued_requests(
    p: MockEngine, d: MockEngine, ends: bool
) -> None:
    d.usual = gate = Gate()
    limits = ("--max-engine-requests=1", "--shutdown-delay=0", "--shutdown-timeout")
    async with (
        serving_router(p, d, *limits, "10" if ends else "0.3") as router,
        httpx.AsyncClient(base_url=router.url, timeout=20) as client,
    ):
        body = {"prompt": "x", "max_tokens": 2}
        asked = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(4)]
        await eventually(lambda: gate.held)
        await _until_metric(client, "disagg_router_queue_depth 3.0")
        router.process.send_signal(signal.SIGTERM)
        await router.until("shutting down")
        if ends:
            gate.let(4)
        answers = await asyncio.gather(*asked)
        assert {answer.status_code for answer in answers} == {200 if ends else 503}
        assert all("error" in answer.json() for answer in answers if not ends)
        assert await router.ended() == 0


async def _until_metric(client: httpx.AsyncClient, line: str) -> None:
    async with asyncio.timeout(5):
        while line not in (await client.get("/metrics")).text:
            pass


# Limits of the server.


async def test_request_beyond_the_memory_limit_is_rejected_before_its_body_is_read(
    start_router: StartRouter,
) -> None:
    router = await start_router(max_body_size=100_000, max_held_bodies=100_000)
    body = b'{"prompt": "%b"}' % (b"x" * 60_000)
    asked = post(body)
    async with router.socket() as slow:
        await slow.send(asked[:-1])
        await eventually(lambda: router.gateway.memory.bodies.size > 59_000)
        async with router.socket() as other:
            await other.send(asked[:200])
            head, told = await other.answer()
            assert head.startswith(b"HTTP/1.1 503")
            assert b"\r\nretry-after: 1\r\n" in head
            assert b"ServiceUnavailableError" in told
        await slow.send(asked[-1:])
        assert (await slow.head()).startswith(b"HTTP/1.1 200")
    await eventually(lambda: not router.gateway.memory.bodies.size)
    assert router.metric("refusals_total", reason="bodies") == 1
    assert (await router.complete(prompt="x" * 60_000)).status_code == 200


async def test_chunked_body_is_limited_as_it_arrives(start_router: StartRouter) -> None:
    router = await start_router(max_body_size=100_000, max_held_bodies=100_000)
    async with router.socket() as slow, router.socket() as other:
        await slow.send(post(b"x" * 60_000)[:-1])
        await eventually(lambda: router.gateway.memory.bodies.size > 59_000)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        await other.send(head + b"c350\r\n" + b"x" * 50_000 + b"\r\n")
        assert (await other.answer())[0].startswith(b"HTTP/1.1 503")
        await eventually(lambda: router.gateway.memory.bodies.size < 61_000)


async def test_body_memory_is_released_however_a_request_ends(router: Router) -> None:
    asked = post(b'{"prompt": "%b"}' % (b"x" * 10_000))
    async with router.socket() as client:
        await client.send(asked * 3 + asked[:-1])
        await client.head()
    async with router.socket() as client:
        await client.send(asked + asked[:-1] + b"}" + b"rubbish\r\n\r\n")
        await client.until_closed()
    await eventually(lambda: not router.gateway.memory.bodies.size)


@pytest.mark.slow
async def test_connections_beyond_the_limit_are_rejected_and_health_is_answered(
    start_router: StartRouter,
) -> None:
    router = await start_router(max_connections=2)
    async with router.socket() as one, router.socket() as two:
        await eventually(lambda: router.metric("client_connections") == 2)
        check_refusal(await router.complete(), 503, router, "connections")
        assert (await router.client.get("/health")).status_code == 200
        async with router.socket() as silent:
            assert await silent.until_closed() == b"", "which nobody waits for long"
        await one.send(post(b'{"prompt": "x"}'))
        assert (await one.head()).startswith(b"HTTP/1.1 200")
        assert two.writer.transport.get_write_buffer_size() == 0
    await eventually(lambda: router.metric("client_connections") == 0)
    assert (await router.complete()).status_code == 200


async def test_connections_far_beyond_the_limit_are_closed(start_router: StartRouter) -> None:
    router = await start_router(max_connections=1)
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(router.socket())
            for _ in range(MAX_EXCESS_CONNECTIONS + 20)
        ]
        await eventually(lambda: router.metric("refusals_total", reason="connections") == 19)
        assert router.metric("client_connections") == MAX_EXCESS_CONNECTIONS + 1
        ended = 0
        for client in clients[-19:]:
            with contextlib.suppress(ConnectionError):
                assert await client.until_closed() == b""
            ended += 1
        assert ended == 19
