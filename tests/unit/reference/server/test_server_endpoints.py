from importlib.metadata import version

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.reference.server.fake_engine import HELD, RunningServer


async def test_every_served_name_is_listed_and_can_be_asked_for(server: RunningServer) -> None:
    listed = (await server.client.get("/v1/models")).json()
    assert [card["id"] for card in listed["data"]] == ["tiny", "alias"]
    assert {card["max_model_len"] for card in listed["data"]} == {256}
    for name in ("tiny", "alias"):
        assert (await server.post("/v1/completions", prompt="a", model=name)).status_code == 200


async def test_health_follows_the_engine(real_server: RunningServer) -> None:
    assert (await real_server.client.get("/health")).status_code == 200
    real_server.engine.is_healthy = False
    for response in (
        await real_server.client.get("/health"),
        await real_server.post("/v1/completions", prompt="a"),
    ):
        assert response.status_code == 503
        assert response.json()["error"]["type"] == "ServiceUnavailableError"


async def test_metrics_show_what_engine_and_connector_count(real_server: RunningServer) -> None:
    response = await real_server.client.get("/metrics")
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    assert all(name.startswith(("disagg_engine_", "vllm:nixl_")) for name, *_ in samples)
    for name, value in {
        "requests_running": 1,
        "requests_waiting": 2,
        "requests_waiting_for_remote_kv": 3,
        "blocks": 100,
        "blocks_free": 90,
        "blocks_delayed": 4,
        "prompt_tokens_total": 1000,
        "prompt_tokens_computed_total": 500,
        "prompt_tokens_cached_total": 200,
        "prompt_tokens_fetched_total": 300,
        "generation_tokens_total": 77,
        "preemptions_total": 7,
        "kv_blocks_received_total": 12,
        "kv_leases_active": 2,
    }.items():
        assert samples[(f"disagg_engine_{name}",)] == value
    assert samples[("disagg_engine_requests_finished_total", "length")] == 6


async def test_text_is_tokenized(server: RunningServer) -> None:
    answer = (await server.post("/tokenize", prompt="hé")).json()
    assert answer == {"count": 3, "max_model_len": 256, "tokens": [104, 195, 169]}


async def test_messages_are_tokenized_as_a_chat_would_send_them(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tokens = (await server.post("/tokenize", messages=messages)).json()["tokens"]
    await server.post("/v1/chat/completions", messages=messages)
    assert tuple(tokens) == server.engine.requests[0].prompt_token_ids


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 7}, "prompt"),
        ("/tokenize", {"messages": [7]}, "messages"),
    ],
)
async def test_what_cannot_be_tokenized_is_a_400(
    path: str, body: dict[str, object], param: str, server: RunningServer
) -> None:
    response = await server.post(path, **body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_unknown_paths_and_methods_are_error_objects(real_server: RunningServer) -> None:
    unknown = await real_server.client.get("/v1/unknown")
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "NotFoundError")
    wrong = await real_server.client.get("/v1/completions")
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (405, "MethodNotAllowedError")
    assert wrong.headers["allow"] == "POST"


async def test_kv_is_released_by_the_params_that_announced_it(server: RunningServer) -> None:
    for request_id, held in (("held", True), ("other", False)):
        params = {"remote_engine_id": "me", "remote_request_id": request_id, "tp_size": 1}
        answer = await server.post("/disagg/release", kv_transfer_params=params)
        assert answer.json() == {"released": held}
    assert server.engine.released == [HELD, ("me", "other")]


@pytest.mark.parametrize(
    "params", [None, "x", {}, {"remote_engine_id": "me"}, {"remote_request_id": [1]}]
)
async def test_a_release_that_names_nothing_is_refused(
    server: RunningServer, params: object
) -> None:
    answer = await server.post("/disagg/release", kv_transfer_params=params)
    assert answer.status_code == 400
    assert "kv_transfer_params" in answer.json()["error"]["message"]
    assert not server.engine.released


async def test_an_engine_without_a_connector_says_who_it_is(server: RunningServer) -> None:
    said = (await server.client.get("/disagg/identity")).json()
    assert said["versions"]["disagg_router"] == version("disagg-router")
    assert (said["engine"], said["ranks"], said["dp_size"]) == ("disagg-engine", [], 1)
