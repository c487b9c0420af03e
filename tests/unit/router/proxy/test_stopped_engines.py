"""An engine that is being stopped answers 200 with the finish reason "abort": no client sees it, as
long as another engine can answer."""

import json
from typing import Any

import pytest

from scripts.mock_engine import (
    DONE,
    MockEngine,
    Peer,
    Received,
    Script,
)
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import streaming
from tests.unit.router.harness import Router
from tests.unit.router.mock_engine import PARAMS, USUAL

ABORTED = {"index": 0, "text": "", "finish_reason": "abort"}


def choice_of(**choice: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, **choice}]}).encode() + b"\n\n"


def answers_with(*choices: dict[str, Any]) -> Script:
    async def script(request: Received, peer: Peer) -> None:
        content = json.dumps(USUAL | {"choices": list(choices)}, separators=(",", ":"))
        await peer.answer(content.encode())

    return script


async def test_a_prefiller_that_ends_a_request_is_left_for_another_one(
    start_router: StartRouter, p: MockEngine, d: MockEngine, p2: MockEngine
) -> None:
    router = await start_router(ps=[p, p2])
    p.usual = answers_with(ABORTED)
    for _ in range(3):
        assert (await router.complete()).status_code == 200
        assert d.last.json["kv_transfer_params"]["remote_host"] == PARAMS["remote_host"]
    assert p.requests
    assert router.metric("upstream_errors_total", role="prefill", kind="status_5xx") >= 1


async def test_without_another_engine_it_is_no_answer(router: Router, d: MockEngine) -> None:
    d.usual = answers_with(ABORTED)
    answer = await router.complete()
    assert answer.status_code == 503
    assert "is being stopped" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "script",
    [
        answers_with({"index": 0, "text": '{"finish_reason":"abort"}', "finish_reason": "stop"}),
        answers_with(
            {"index": 0, "text": "abort", "finish_reason": "stop", "stop_reason": "abort"}
        ),
        streaming(choice_of(text='"abort"'), choice_of(text='"finish_reason":"abort"'), DONE),
    ],
)
async def test_a_text_that_speaks_of_it_is_a_text(
    router: Router, d: MockEngine, script: Script
) -> None:
    d.usual = script
    answer = await router.complete(stream=script.__qualname__.startswith("streaming"))
    assert answer.status_code == 200
    assert "abort" in answer.text
