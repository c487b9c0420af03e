"""All legs of a request are for one model, whether the client names it or not, and engines whose
models are unknown get no requests beside those whose models are known."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from scripts.mock_engine import MockEngine, Peer, Received, Script
from tests.unit.router.conftest import StartRouter
from tests.unit.router.conversations.engines import decoding, prefilling
from tests.unit.router.conversations.test_turns import AGAIN, ASKED
from tests.unit.router.engine_scripts import answering, usual_decode
from tests.unit.router.harness import Router, eventually
from tests.unit.router.mock_engine import PARAMS, USUAL, running_engine

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"max_tokens": 5, **CHAT},
    "/v1/messages/count_tokens": CHAT,
    "/v1/embeddings": {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
}
NAMELESS: list[dict[str, Any]] = [{}, {"model": None}, {"model": ""}]
FORM = "/v1/audio/transcriptions"


@pytest.fixture
def two(p: MockEngine, d: MockEngine, p2: MockEngine, d2: MockEngine) -> list[MockEngine]:
    """A pair for the model a, and a pair for b."""
    p.models = d.models = ["a"]
    p2.models = d2.models = ["b"]
    return [p, d, p2, d2]


async def start_two(start_router: StartRouter, two: list[MockEngine], **settings: Any) -> Router:
    p, d, p2, d2 = two
    router = await start_router(ps=[p, p2], ds=[d, d2], **settings)
    await router.knows_its_engines()
    return router


def serves(engine: MockEngine, *models: str) -> None:
    """Make the engine answer 404 for other models, as vLLM does, and name its model else."""
    usual = engine.usual

    async def answer(request: Received, peer: Peer) -> None:
        model = request.json.get("model") or models[0]
        if model not in models:
            error = {"message": f"The model `{model}` does not exist.", "param": "model"}
            await peer.answer({"error": {**error, "type": "NotFoundError", "code": 404}}, 404)
        elif engine.usual is answer and "max_tokens" in request.json:
            await usual(request, peer)
        else:
            await peer.answer({**USUAL, "model": model})

    engine.usual = answer


async def unreadable(request: Received, peer: Peer) -> None:
    await peer.answer({"error": {"message": "no key"}}, 401)


async def empty(request: Received, peer: Peer) -> None:
    await peer.answer({"object": "list", "data": []})


async def transcribes(request: Received, peer: Peer) -> None:
    await peer.answer({"text": "hello"})


async def silent(request: Received, peer: Peer) -> None:
    await peer.wait_left(None)


@pytest.mark.parametrize("named", NAMELESS)
@pytest.mark.parametrize("path", ENDPOINTS)
async def test_request_without_a_model_is_for_the_only_one(
    start_router: StartRouter, p: MockEngine, d: MockEngine, path: str, named: dict[str, Any]
) -> None:
    p.models, d.models, d.adapters = ["a", "first"], ["first", "a"], ["sql"]
    router = await start_router()
    await router.knows_its_engines()
    await router.client.post(path, json={**ENDPOINTS[path], **named})
    assert {r.json["model"] for r in (*p.requests, *d.requests)} == {"a"}


@pytest.mark.parametrize("model", [*NAMELESS, {"model": 7}])
@pytest.mark.parametrize("path", ENDPOINTS)
async def test_request_without_a_model_is_refused_where_several_are_served(
    start_router: StartRouter, two: list[MockEngine], path: str, model: dict[str, Any]
) -> None:
    router = await start_two(start_router, two)
    answer = await router.client.post(path, json={**ENDPOINTS[path], **model})
    assert answer.status_code == 400
    error = answer.json()["error"]
    if model.get("model"):
        assert "must be a string" in error["message"]
    else:
        assert error["message"].endswith("Models that are served: a, b.")
    assert not any(mock.requests for mock in two)


@pytest.mark.parametrize("given", [{}, {"model": ""}])
async def test_form_without_a_model_is_for_the_only_one(
    start_router: StartRouter, two: list[MockEngine], given: dict[str, str]
) -> None:
    router = await start_two(start_router, two)
    files = {"file": ("a.wav", b"RIFF")}
    answer = await router.client.post(FORM, data=given, files=files)
    assert answer.status_code == 400
    two[2].models = two[3].models = ["a"]
    two[2].healthy = two[3].healthy = False
    await eventually(lambda: not any(router.engine(one).is_usable for one in two[2:]))
    two[2].healthy = two[3].healthy = True
    await eventually(lambda: router.engine(two[3]).models == frozenset("a"))
    await eventually(lambda: router.gateway.fleet.snapshot.default_model == "a")
    two[1].usual = two[3].usual = transcribes
    await router.client.post(FORM, data=given, files=files)
    (request,) = [r for mock in two for r in mock.requests if r.path == FORM]
    assert (b'name="model"\r\n\r\na\r\n' in request.body) is bool("model" in given)


async def test_default_model_does_not_change_while_engines_are_lost(
    start_router: StartRouter, two: list[MockEngine]
) -> None:
    router = await start_two(start_router, two)
    for mock in two[2:]:
        mock.healthy = False
    await eventually(lambda: not any(router.engine(mock).is_usable for mock in two[2:]))
    answer = await router.client.post("/v1/completions", json={"prompt": "hi"})
    assert answer.status_code == 400


@pytest.mark.parametrize("listing", [unreadable, empty, silent])
async def test_engine_whose_models_are_unknown_gets_no_requests_until_they_are_read(
    start_router: StartRouter, p: MockEngine, d: MockEngine, d2: MockEngine, listing: Script
) -> None:
    d2.listing, d2.models, p.models, d.models = listing, ["a"], ["a"], ["a"]
    router = await start_router(ds=[d, d2], health_timeout=0.2)
    await eventually(lambda: router.engine(d2).is_unread and router.engine(d).is_available)
    for _ in range(12):
        assert (await router.complete(model="a")).status_code == 200
    assert (await router.client.post("/v1/completions", json=CHAT)).status_code == 200
    assert not d2.requests
    await eventually(lambda: router.engine(d2).health == "healthy")
    ready = (await router.client.get("/ready")).json()
    name = router.engine(d2).name
    assert (ready["status"], [*ready["reasons"]]) == ("degraded", [name])
    assert ready["reasons"][name].startswith("its models are unknown: /v1/models")
    assert ready["findings"][0]["kind"] == "unknown_models"
    d2.listing = None
    for connection in list(d2.open_connections):  # ends a read that waits
        connection.transport.abort()
    await eventually(lambda: router.engine(d2).is_available)
    for _ in range(2):
        assert (await router.complete(model="a")).status_code == 200
    assert d2.requests


@pytest.mark.parametrize("is_listed", [True, False])
async def test_list_of_models_has_those_that_are_named_in_the_engines_file(
    start_router: StartRouter, p: MockEngine, d: MockEngine, tmp_path: Path, is_listed: bool
) -> None:
    p.models, p.listing = ["b", "c"], None if is_listed else unreadable
    d.listing = p.listing
    file = tmp_path / "engines.yaml"
    listed = [
        {"url": f"http://127.0.0.1:{one.port}", "role": role, "models": ["a", "b"]}
        for one, role in ((p, "prefill"), (d, "decode"))
    ]
    file.write_text(json.dumps({"engines": listed}))
    router = await start_router(ps=[], ds=[], engines_file=file)
    await eventually(lambda: router.engine(d).is_available and router.engine(p).is_available)
    found = (await router.client.get("/v1/models")).json()["data"]
    assert sorted(model["id"] for model in found) == ["a", "b"]
    assert (await router.complete(model="a")).status_code == 200


@pytest.mark.parametrize("listing", [unreadable, silent])
async def test_engine_that_returns_with_unknown_models_has_not_those_of_before(
    start_router: StartRouter, two: list[MockEngine], listing: Script
) -> None:
    router = await start_two(start_router, two, health_timeout=0.2)
    d = two[1]
    d.healthy = False
    await eventually(lambda: not router.engine(d).is_usable)
    d.listing, d.healthy = listing, True
    await eventually(lambda: router.engine(d).health == "healthy")
    assert router.engine(d).is_unread
    answer = await router.complete(model="a")
    assert (answer.status_code, d.requests) == (503, [])
    assert "are unknown" in answer.json()["error"]["message"]


@pytest.mark.parametrize("is_prefiller", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_another_engine_answers_after_the_404_of_one_with_an_outdated_list(
    start_router: StartRouter, two: list[MockEngine], path: str, is_prefiller: bool
) -> None:
    stale = two[2 if is_prefiller else 3]
    two[2].models = two[3].models = ["a"]
    serves(stale, "b")
    router = await start_two(start_router, two, health_interval=30)
    await router.knows_its_engines()
    stale.models = ["b"]
    for _ in range(4):
        body = {"model": "a", "prompt": "hi", "input": "hi", "max_tokens": 3}
        answer = await router.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        await router.settled()
    rejected = len(stale.requests)
    assert rejected == (path != "/v1/embeddings" or not is_prefiller)
    if rejected:
        await eventually(lambda: router.engine(stale).models == frozenset("b"))
        assert router.engine(stale).is_available, "a 404 does not count against it"


async def test_404_that_is_not_about_the_model_is_the_clients(
    start_router: StartRouter, d: MockEngine
) -> None:
    lacks = answering(404, {"error": {"message": "Not Found", "param": None, "code": 404}})
    router = await start_router()
    await router.knows_its_engines()
    d.scripts = [lacks]
    answer = await router.client.post("/v1/rerank", json={"model": "m"})
    assert answer.status_code == 404
    assert "has no endpoint /v1/rerank" in answer.json()["error"]["message"]
    assert len(d.requests) == 1
    assert router.engine(d).models == frozenset(("m", "other"))


async def test_without_any_list_a_request_stays_with_the_model_of_its_prefill_engine(
    start_router: StartRouter, two: list[MockEngine]
) -> None:
    """An engine that requires the client's key sends no list."""

    def prefill(model: str) -> Script:
        async def answer(request: Received, peer: Peer) -> None:
            params = {**PARAMS, "remote_engine_id": model}
            await peer.answer({**USUAL, "model": model, "kv_transfer_params": params})

        return answer

    for mock, model in zip(two, "aabb", strict=True):
        mock.listing = unreadable
        mock.usual = prefill(model) if mock in (two[0], two[2]) else mock.usual
        serves(mock, model)
    router = await start_router(ps=two[::2], ds=two[1::2])
    for number in range(8):
        body = {"prompt": "hi", "max_tokens": 3, **({"model": "a"} if number > 3 else {})}
        answer = await router.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
    for mock, model in ((two[1], "a"), (two[3], "b")):
        answered = [r.json for r in mock.requests if r.json["model"] == model]
        assert answered
        assert {r["kv_transfer_params"]["remote_engine_id"] for r in answered} == {model}


@pytest.mark.parametrize("has_lists", [True, False])
async def test_turn_of_another_model_reads_nothing_and_goes_to_its_own_engines(
    start_router: StartRouter, two: list[MockEngine], has_lists: bool
) -> None:
    for mock, model in zip(two, "aabb", strict=True):
        mock.usual = prefilling() if mock in (two[0], two[2]) else decoding()
        mock.listing = None if has_lists else unreadable
        if has_lists:
            serves(mock, model)
    router = await start_router(ps=two[::2], ds=two[1::2])
    names: tuple[str | None, ...] = ("a", "b", "a") if has_lists else (None,) * 4
    for asked, messages in zip(names, (ASKED, AGAIN) * 2, strict=False):
        body = {"model": asked, "messages": messages, "conversation_id": "c", "max_tokens": 3}
        answer = await router.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        await router.settled()
    for mock in two[::2]:
        legs = [r.json["kv_transfer_params"] for r in mock.requests if "messages" in r.json]
        assert all(params["remote_block_ids"] is None for params in legs)
    if has_lists:
        rejected = [r.json["model"] for r in two[1].requests if "messages" in r.json]
        assert rejected == ["a", "a"]


async def test_adapters_of_one_name_for_two_models_are_not_mixed(
    start_router: StartRouter, two: list[MockEngine]
) -> None:
    for mock in two:
        mock.adapters = ["sql"]
    router = await start_two(start_router, two)
    for _ in range(6):
        assert (await router.complete(model="sql")).status_code == 200
    assert [len(mock.requests) for mock in two] == [6, 6, 0, 0]
    assert "sql" in (await router.client.get("/ready")).json()["reasons"]["adapters"]


async def test_hedged_legs_are_for_the_requested_model(
    start_router: StartRouter, two: list[MockEngine]
) -> None:
    for mock in two:
        mock.identity = {"capabilities": ["cache_hit_threshold"]}
    async with contextlib.AsyncExitStack() as stack:
        third = await stack.enter_async_context(running_engine(usual_decode))
        third.models, third.identity = ["a"], two[0].identity
        router = await start_router(
            ps=two[::2], ds=[two[1], two[3], third], hedged_decoders=3, decode_first_threshold=0.5
        )
        await router.knows_its_engines()
        for _ in range(4):
            assert (await router.complete(model="a", stream=True)).status_code == 200
        await router.settled()
        assert not two[3].requests
        assert two[1].requests
        assert third.requests
