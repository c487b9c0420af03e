import re
from importlib.metadata import version

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.reference.server.fake_engine import HELD, RunningServer, events_of

PATH = "/v1/completions"
PARAMS = {"do_remote_decode": True, "unknown": [[1, None], {"é": 0.5}]}


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


async def test_without_usage_the_finishing_chunk_carries_the_kv_parameters(
    server: RunningServer,
) -> None:
    chunks = events_of(await server.post(PATH, prompt="hi", stream=True, kv_transfer_params=PARAMS))
    assert [chunk.get("kv_transfer_params") for chunk in chunks] == [
        None,
        None,
        {"answer_to": PARAMS},
    ]
    assert "usage" not in chunks[-1]


@pytest.mark.parametrize(
    ("header", "expected"),
    [("abc", "abc"), ("a:b,c/d e", "a-b-c-d-e"), ("x" * 500, "x" * 128)],
)
async def test_ids_that_would_break_a_notification_are_made_safe(
    header: str, expected: str, server: RunningServer
) -> None:
    response = await server.client.post(
        PATH, json={"prompt": "a"}, headers={"X-Request-Id": header}
    )
    assert response.json()["id"] == f"cmpl-{expected}"
    assert re.fullmatch(f"cmpl-{expected}-[0-9a-f]{{8}}", server.engine.requests[0].request_id)


async def test_the_same_request_id_twice_is_two_requests(server: RunningServer) -> None:
    for _ in range(2):
        await server.client.post(PATH, json={"prompt": "a"}, headers={"X-Request-Id": "same"})
    first, second = server.engine.requests
    assert first.request_id != second.request_id


async def test_several_answers_to_one_prompt_are_refused(server: RunningServer) -> None:
    response = await server.post(PATH, prompt="a", n=2)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "n is not supported by this engine"
    assert not server.engine.requests
