"""A prefill and a decode engine that cannot exchange KV are paired with others, without client
errors."""

import asyncio
import json
from contextlib import AsyncExitStack
from random import Random
from typing import Any

import pytest

from router.commands.status import AvoidedPair, lines, parse_metrics
from router.fleet.engine import CircuitState
from scripts.mock_engine import DONE, MockEngine, Peer, Received, Script, is_release
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import answering, usual_decode
from tests.unit.router.harness import Router, eventually
from tests.unit.router.mock_engine import PARAMS, USUAL, event, running_engine
from tests.unit.router.proxy.test_push import IDENTITY

FAILURE = {
    "remote_engine_id": "p-1",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "scope": "pair",
    "reason": "no handshake within 10 s",
}
ERROR = {"error": {"message": "the KV of this request was not loaded", "kv_load_failure": FAILURE}}
NAMES = {"capabilities": ["load_failures"]}
COMMENT = b": kv_load_failure " + json.dumps(FAILURE).encode() + b"\n"


def prefilling(name: str) -> Script:
    answer = answering(200, USUAL | {"kv_transfer_params": PARAMS | {"remote_engine_id": name}})
    return answer


async def fails(request: Received, peer: Peer) -> None:
    await peer.answer(ERROR, 500)


async def fails_as_stream(request: Received, peer: Peer) -> None:
    """As vLLM does, whose status is sent before anything is loaded."""
    if not request.json.get("stream"):
        await fails(request, peer)
        return
    await peer.stream(b"data: " + json.dumps(ERROR).encode() + b"\n\n", DONE)


ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'


async def fails_behind_a_role(request: Received, peer: Peer) -> None:
    """As a chat of vLLM's does."""
    if not request.json.get("stream"):
        await fails(request, peer)
        return
    await peer.stream(ROLE, b"data: " + json.dumps(ERROR).encode() + b"\n\n", DONE)


async def computes(request: Received, peer: Peer) -> None:
    if request.json.get("stream"):
        await peer.stream(COMMENT + event("a"), event("b"), DONE)
    else:
        await peer.answer(USUAL | {"kv_transfer_params": {"kv_load_failure": FAILURE}})


async def computes_late(request: Received, peer: Peer) -> None:
    """It says a token before it has loaded anything."""
    if request.json.get("stream"):
        await peer.stream(event("a"), COMMENT + event("b"), DONE)
    else:
        await computes(request, peer)


FAULTS = {
    "fails": fails,
    "fails as a stream": fails_as_stream,
    "fails behind a role": fails_behind_a_role,
    "computes": computes,
    "computes late": computes_late,
}


class PairedFleet:
    """Two prefillers and two decoders, of which the first ones do not reach each other."""

    def __init__(self, ps: list[MockEngine], ds: list[MockEngine]) -> None:
        self.ps, self.ds = ps, ds
        self.cut_off = {(0, 0)}
        self.pairs: list[tuple[int, int]] = []

    def breaks(self, fault: Script) -> None:
        for place, engine in enumerate(self.ds):
            engine.usual = self._decoding(place, fault)

    def _decoding(self, place: int, fault: Script) -> Script:
        async def answer(request: Received, peer: Peer) -> None:
            params = request.json.get("kv_transfer_params") or {}
            name = params.get("remote_engine_id")
            if name is None or is_release(request):
                await usual_decode(request, peer)
                return
            pair = (int(name.removeprefix("p-")) - 1, place)
            self.pairs.append(pair)
            await (fault if pair in self.cut_off else usual_decode)(request, peer)

        return answer


@pytest.fixture
def fleet(p: MockEngine, d: MockEngine, p2: MockEngine, d2: MockEngine) -> PairedFleet:
    made = PairedFleet([p, p2], [d, d2])
    p.usual, p2.usual = prefilling("p-1"), prefilling("p-2")
    d.identity = d2.identity = NAMES
    made.breaks(fails)
    return made


async def started(start: StartRouter, fleet: PairedFleet, **changes: Any) -> Router:
    router = await start(ps=fleet.ps, ds=fleet.ds, **changes)
    await router.knows_its_engines()
    return router


async def repeat(router: Router, times: int, **fields: Any) -> None:
    for _ in range(times):
        answer = await router.complete(**fields)
        assert answer.status_code == 200, answer.text
        assert "kv_load_failure" not in answer.text
        assert "10.0.0.1" not in answer.text
        if fields.get("stream"):
            assert answer.text.endswith("data: [DONE]\n\n")
            assert answer.text.count('"text": "') == 2
    await router.settled()


def first_names(router: Router, fleet: PairedFleet) -> tuple[str, str]:
    return router.engine(fleet.ps[0]).name, router.engine(fleet.ds[0]).name


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_pair_that_fails_is_not_paired_again_and_both_go_on_with_others(
    start_router: StartRouter, fleet: PairedFleet, fault: str, stream: bool
) -> None:
    fleet.breaks(FAULTS[fault])
    router = await started(start_router, fleet)
    await repeat(router, 24, stream=stream)
    assert fleet.pairs.count((0, 0)) == 1
    assert {(0, 1), (1, 0)} <= set(fleet.pairs)
    prefiller, decoder = first_names(router, fleet)
    assert router.metric("pair_avoided", prefiller=prefiller, decoder=decoder) == 1
    assert router.metric("kv_load_failures_total", scope="pair") == 1
    assert all(e.breaker.circuit is CircuitState.CLOSED for e in router.gateway.fleet.engines)
    assert router.engine(fleet.ds[0]).breaker._consecutive == 0, "it is not blamed"
    status = parse_metrics(router.gateway.metrics.exposition().decode())
    assert status.avoided_pairs == (AvoidedPair(prefiller, decoder),)
    assert f"pair {prefiller} -> {decoder}" in "\n".join(lines(status, None, 0))


async def test_a_pair_is_tried_again_and_a_load_that_works_clears_it(
    start_router: StartRouter, fleet: PairedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.fleet.unreachable_pairs.FIRST_AVOIDANCE_S", 0.05)
    router = await started(start_router, fleet)
    await repeat(router, 4)
    fleet.cut_off.clear()
    pairs = router.gateway.fleet.unreachable_pairs
    while pairs:
        await repeat(router, 1)
    fleet.pairs.clear()
    await repeat(router, 8)
    assert (0, 0) in fleet.pairs
    prefiller, decoder = first_names(router, fleet)
    assert router.metric("pair_avoided", prefiller=prefiller, decoder=decoder) == 0


@pytest.mark.parametrize("fault", ["fails", "computes"])
async def test_the_only_pair_is_asked_all_the_same_and_then_the_decoder_alone(
    start_router: StartRouter, fleet: PairedFleet, fault: str
) -> None:
    fleet.breaks(FAULTS[fault])
    router = await start_router(ps=fleet.ps[:1], ds=fleet.ds[:1], without_prefiller="decode")
    await router.knows_its_engines()
    await repeat(router, 3)
    assert fleet.pairs == [(0, 0)] * 3
    alone = router.metric("decode_only_total", reason="no_pair")
    assert alone == (3 if fault == "fails" else 0)


async def test_where_no_decoder_may_prefill_the_failure_of_the_only_pair_is_told(
    start_router: StartRouter, fleet: PairedFleet
) -> None:
    router = await start_router(ps=fleet.ps[:1], ds=fleet.ds[:1])
    await router.knows_its_engines()
    answer = await router.complete()
    await router.settled()
    assert answer.status_code == 502
    assert "10.0.0.1" not in answer.text
    assert "could not load the KV" in answer.json()["error"]["message"]


@pytest.mark.parametrize("few", ["one prefiller", "one decoder"])
async def test_an_engine_that_is_the_only_one_of_its_role_is_paired_with_another(
    start_router: StartRouter, fleet: PairedFleet, few: str
) -> None:
    ps = fleet.ps[:1] if few == "one prefiller" else fleet.ps
    ds = fleet.ds[:1] if few == "one decoder" else fleet.ds
    router = await start_router(ps=ps, ds=ds)
    await router.knows_its_engines()
    await repeat(router, 10)
    assert fleet.pairs.count((0, 0)) == 1
    assert router.metric("decode_only_total", reason="no_pair") == 0


async def test_a_request_whose_kv_alone_was_gone_speaks_against_nobody(
    start_router: StartRouter, fleet: PairedFleet
) -> None:
    gone = FAILURE | {"scope": "request", "reason": "its lease has ended"}
    count = iter(range(100))

    async def fails_once(request: Received, peer: Peer) -> None:
        if next(count):
            await usual_decode(request, peer)
        else:
            await peer.answer({"error": {"message": "gone", "kv_load_failure": gone}}, 500)

    fleet.breaks(fails_once)
    router = await started(start_router, fleet)
    await repeat(router, 8)
    assert fleet.pairs.count((0, 0)) > 1
    assert not router.gateway.fleet.unreachable_pairs
    assert router.metric("kv_load_failures_total", scope="request") == 1


async def test_a_pair_that_cannot_push_is_not_paired_again(
    start_router: StartRouter, fleet: PairedFleet
) -> None:
    for number, engine in enumerate(fleet.ps, start=1):
        rank = IDENTITY["ranks"][0] | {"remote_engine_id": f"p-{number}"}
        engine.identity = IDENTITY | {"ranks": [rank]}
    for engine in fleet.ds:
        engine.identity = NAMES | {"transfer_modes": ["push"]}
    router = await started(start_router, fleet)
    await repeat(router, 16)
    assert fleet.pairs.count((0, 0)) == 1
    assert {(0, 1), (1, 0)} <= set(fleet.pairs)


async def test_a_restarted_engine_is_paired_with_all_again(
    start_router: StartRouter, fleet: PairedFleet
) -> None:
    router = await started(start_router, fleet)
    await repeat(router, 4)
    assert router.gateway.fleet.unreachable_pairs
    fleet.ds[0].healthy = False
    await eventually(lambda: not router.engine(fleet.ds[0]).is_usable)
    assert not router.gateway.fleet.unreachable_pairs


@pytest.mark.parametrize("seed", range(4))
async def test_whichever_pairs_are_cut_off_all_are_answered_and_each_is_tried_once(
    start_router: StartRouter, fleet: PairedFleet, seed: int
) -> None:
    choose = Random(seed)
    num_ps, num_ds = choose.randint(1, 4), choose.randint(1, 4)
    every = {(i, j) for i in range(num_ps) for j in range(num_ds)}
    fleet.cut_off = {pair for pair in every if choose.random() < 0.5}
    left = every - fleet.cut_off
    async with AsyncExitStack() as stack:
        for number in range(3, num_ps + 1):
            fleet.ps.append(
                await stack.enter_async_context(running_engine(prefilling(f"p-{number}")))
            )
        for _ in range(3, num_ds + 1):
            fleet.ds.append(await stack.enter_async_context(running_engine(usual_decode)))
            fleet.ds[-1].identity = NAMES
        fleet.ps, fleet.ds = fleet.ps[:num_ps], fleet.ds[:num_ds]
        fleet.breaks(choose.choice([*FAULTS.values()]))
        router = await started(start_router, fleet, without_prefiller="decode")
        await repeat(router, 40, stream=choose.random() < 0.5)
        if left:
            assert sum(pair in fleet.cut_off for pair in fleet.pairs) <= len(fleet.cut_off)
        worked = set(fleet.pairs) & left
        assert {p for p, _ in worked} == {p for p, _ in left}
        assert {d for _, d in worked} == {d for _, d in left}
        # More at once than may be tried again within some seconds.
        answers = await asyncio.gather(*(router.complete() for _ in range(120)))
        assert {answer.status_code for answer in answers} == {200}
        await router.settled()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_model_that_speaks_of_it_is_left_alone(
    start_router: StartRouter, fleet: PairedFleet, stream: bool
) -> None:
    said = '\n: kv_load_failure {"scope": "pair"}\n"kv_load_failure": {"scope": "pair"}'

    async def speaks(request: Received, peer: Peer) -> None:
        if request.json.get("stream"):
            await peer.stream(event(said), DONE)
        else:
            await peer.answer(USUAL | {"choices": [{"index": 0, "text": said}]})

    fleet.breaks(speaks)
    router = await start_router(ps=fleet.ps[:1], ds=fleet.ds[:1])
    await router.knows_its_engines()
    answer = await router.complete(stream=stream)
    assert json.dumps(said) in answer.text
    assert not router.gateway.fleet.unreachable_pairs


STRANGE: list[Any] = [
    None,
    1,
    "x",
    [],
    {},
    {"scope": 1},
    {"scope": "pair", "reason": {"a": "\x1b"}},
]


@pytest.mark.parametrize("told", STRANGE)
async def test_whatever_a_decoder_says_of_a_failure_harms_nothing(
    start_router: StartRouter, fleet: PairedFleet, told: Any
) -> None:
    fails_strangely = answering(500, {"error": {"message": "x", "kv_load_failure": told}})
    fleet.breaks(fails_strangely)
    router = await started(start_router, fleet)
    await repeat(router, 4)
