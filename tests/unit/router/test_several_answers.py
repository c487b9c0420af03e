"""Several answers to one prompt are prefilled once if every decode engine loads KV once for all."""

from typing import Any

import pytest

from scripts.mock_engine import MockEngine
from tests.unit.router.conftest import StartRouter
from tests.unit.router.conversations.engines import decoding
from tests.unit.router.engine_scripts import reset, usual_decode
from tests.unit.router.harness import Router
from tests.unit.router.mock_engine import PARAMS
from tests.unit.router.test_resume import CAPABILITIES, OURS

SHARES = OURS | {"capabilities": [*CAPABILITIES, "shared_loads", "cache_hit_threshold"]}


@pytest.fixture
async def shared(start_router: StartRouter, p: MockEngine, d: MockEngine) -> Router:
    p.identity = d.identity = SHARES
    return await start_router(identified=True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [2, 128])
async def test_they_are_prefilled_once(
    shared: Router, p: MockEngine, d: MockEngine, n: int, stream: bool
) -> None:
    answer = await shared.complete(n=n, stream=stream, seed=3, conversation_id="c")
    assert answer.status_code == 200
    (prefill,), (decode,) = p.requests, d.requests
    assert "n" not in prefill.json
    assert prefill.json["max_tokens"] == 1
    assert "hand_over" not in prefill.json["kv_transfer_params"]
    assert decode.json["n"] == n
    # Nothing of what only one answer has: each would be kept, and begun with the same token.
    assert decode.json["kv_transfer_params"] == PARAMS | {"retain": False}


@pytest.mark.parametrize("fields", [
    {"n": 2, "best_of": 3},
    {"n": 2, "prompt": ["a", "b"]},
    {"n": 2, "prompt_logprobs": 0},
    {"n": 2, "echo": True, "logprobs": 1},
    {"n": 2, "use_beam_search": True},
    {"n": 129},
    {"n": 0},
    {"n": 2.5},
    {"n": "x"},
])  # fmt: skip
async def test_a_decoder_does_alone_what_is_more_than_that(
    shared: Router, p: MockEngine, d: MockEngine, fields: dict[str, Any]
) -> None:
    await shared.complete(**fields)
    assert not p.requests
    assert d.last.json.get("n") == fields["n"]


@pytest.mark.parametrize("where", [0, 1])
async def test_so_it_does_where_any_decoder_might_read_for_each(
    start_router: StartRouter, p: MockEngine, d: MockEngine, where: int
) -> None:
    other = MockEngine(usual_decode, identity=OURS if where else None)
    await other.start()
    try:
        d.identity = SHARES
        router = await start_router(ds=[d, other], identified=True)
        for _ in range(4):
            assert (await router.complete(n=2)).status_code == 200
        assert not p.requests
    finally:
        await other.stop()


async def test_a_threshold_is_not_asked_for_each_of_them(
    shared: Router, p: MockEngine, d: MockEngine
) -> None:
    assert (await shared.complete(n=2, cache_hit_threshold=0.5)).status_code == 200
    assert [request.json["cache_hit_threshold"] for request in (*p.requests, *d.requests)] == [0, 0]


async def test_a_decoder_that_fails_costs_another_prefill(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    other = MockEngine(decoding(), identity=SHARES)
    await other.start()
    try:
        p.identity = d.identity = SHARES
        router = await start_router(ds=[d, other], identified=True)
        d.scripts = other.scripts = [reset]
        assert (await router.complete(n=2)).status_code == 200
        assert len(p.requests) == 2
    finally:
        await other.stop()
