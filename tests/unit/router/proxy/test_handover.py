"""Hand-over of the first token from a prefill engine to a decode engine."""

import functools
import json
from typing import Any

import pytest

from router.proxy.first_token import can_hand_over
from scripts.mock_engine import MockEngine, Peer, Received, Script
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import answering, fails, refuses
from tests.unit.router.harness import Router, eventually
from tests.unit.router.mock_engine import PARAMS

RENDERS = {"model": "1", "tokenizer": "2", "chat_template": "3"}
PREFILLS = {"capabilities": ["prefix_proof", "turns", "release", "hand_over"], "renders": RENDERS}
DECODES = {"capabilities": ["prefix_proof", "turns", "release", "begun"], "renders": RENDERS}
BEGUN = {"prompt_token_ids": "AQAAAgAA", "output_token_ids": "BwAA"}
PROVEN = PARAMS | {"prefix_proof": {"version": 1}}
HANDED = PROVEN | {"begun": BEGUN}
CHOICE = {"index": 0, "text": "x", "finish_reason": "length", "logprobs": None}
ANSWER = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m"}


def prefilled(choice: dict[str, Any] = CHOICE, params: dict[str, Any] = HANDED) -> Script:
    async def script(request: Received, peer: Peer) -> None:
        usage = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
        content = ANSWER | {"choices": [choice], "usage": usage, "kv_transfer_params": params}
        await peer.answer(content)

    return script


@pytest.fixture
def start_router(start_router: StartRouter, p: MockEngine, d: MockEngine) -> StartRouter:
    p.identity, d.identity = p.identity or PREFILLS, d.identity or DECODES
    p.usual = prefilled()

    return functools.partial(start_router, identified=True)


def generations(engine: MockEngine) -> list[Received]:
    return [one for one in engine.requests if one.path.startswith("/v1/")]


def given(engine: MockEngine) -> list[dict[str, Any]]:
    """Return the kv_transfer_params without the router's own key `retain`."""
    params = [one.json["kv_transfer_params"] for one in generations(engine)]
    return [{name: one[name] for name in one if name != "retain"} for one in params]


async def test_decoder_continues_from_the_prefillers_token(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    answer = await router.complete(min_tokens=3, seed=5)
    assert answer.status_code == 200
    asked = p.last.json
    assert asked["kv_transfer_params"]["hand_over"] is True
    assert asked["kv_transfer_params"]["do_remote_decode"] is True
    assert (asked["max_tokens"], asked["min_tokens"], asked["seed"]) == (1, 1, 5)
    assert given(d)[-1] == HANDED
    assert (d.last.json["max_tokens"], d.last.json["min_tokens"]) == (7, 3)
    assert router.metric("handed_over_total", outcome="continued") == 1


async def test_clients_cannot_send_generated_tokens(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    theirs = {"begun": {"prompt_token_ids": "AAAA"}, "hand_over": True, "spoken": 1}
    await router.complete(kv_transfer_params=theirs, vllm_xargs={"kv_transfer_params": theirs})
    assert given(d)[-1] == HANDED
    assert "AAAA" not in json.dumps(p.last.json)


@pytest.mark.parametrize("streamed", [False, True])
async def test_answer_that_ends_with_its_first_token_needs_no_decoder(
    start_router: StartRouter, p: MockEngine, d: MockEngine, streamed: bool
) -> None:
    choice = CHOICE | {"text": "", "finish_reason": "stop", "stop_reason": 9}
    p.usual = prefilled(choice)
    router = await start_router(conversation_store="memory")
    answer = await router.complete(stream=streamed, conversation_id="c", logprobs=1)
    assert answer.status_code == 200
    assert answer.headers["content-type"].split(";")[0] == (
        "text/event-stream" if streamed else "application/json"
    )
    assert "kv_transfer_params" not in answer.text
    if streamed:
        assert answer.headers["x-accel-buffering"] == "no"
        first, *_, last = answer.text.strip().split("\n\n")
        assert json.loads(first.removeprefix("data: "))["choices"] == [choice]
        assert last == "data: [DONE]"
    else:
        assert answer.json()["choices"] == [choice]
        assert answer.json()["usage"]["prompt_tokens"] == 2
    assert generations(d) == []
    await eventually(lambda: p.last.path == "/disagg/release")
    assert p.last.json["kv_transfer_params"] == PROVEN
    assert router.metric("handed_over_total", outcome="ended") == 1
    assert router.metric("engine_holding", role="prefill", engine=router.engine(p).name) == 0


async def test_prefiller_alone_answers_a_request_for_one_token(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    answer = await router.stream(max_tokens=1, logprobs=2)
    assert answer.status_code == 200
    assert generations(d) == []
    (asked,) = generations(p)
    assert asked.json["stream"] is True
    assert asked.json["logprobs"] == 2
    assert "kv_transfer_params" not in asked.json
    assert router.metric("decode_only_total", reason="one_token") == 1


async def test_turn_of_one_token_uses_both_engines(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    router = await start_router(conversation_store="memory")
    await router.complete(max_tokens=1, conversation_id="c")
    assert "hand_over" not in p.last.json["kv_transfer_params"]
    assert len(generations(d)) == 1


async def test_prefiller_gets_the_clients_logprobs_fields(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    """An engine that hands over returns log-probabilities with the tokens."""
    handed = HANDED | {"begun": BEGUN | {"logprobs": [[[7, -0.5]]]}}
    p.usual = prefilled(params=handed)
    router = await start_router()
    await router.complete(logprobs=2)
    assert p.last.json["logprobs"] == 2
    assert given(d)[-1] == handed


async def test_no_hand_over_between_engines_with_different_render_hashes(
    start_router: StartRouter, p: MockEngine, d: MockEngine, caplog: pytest.LogCaptureFixture
) -> None:
    d.identity = DECODES | {"renders": RENDERS | {"chat_template": "4"}}
    router = await start_router()
    await router.complete()
    await router.complete(max_tokens=1)
    assert "hand_over" not in p.last.json["kv_transfer_params"]
    assert given(d)[-1] == PROVEN
    assert "differ in chat_template" in caplog.text
    assert router.metric("handed_over_total", outcome="rendering_differs") == 1
    assert len(generations(d)) == 2


@pytest.mark.parametrize(
    ("of_p", "of_d"),
    [
        ({"capabilities": ["release"], "renders": RENDERS}, DECODES),
        (PREFILLS, {"capabilities": ["release"], "renders": RENDERS}),
        ({"capabilities": PREFILLS["capabilities"]}, {"capabilities": DECODES["capabilities"]}),
        ({"capabilities": PREFILLS["capabilities"], "renders": [1]}, DECODES),
    ],
)
async def test_hand_over_needs_support_of_both_engines(
    start_router: StartRouter, p: MockEngine, d: MockEngine, of_p: Any, of_d: Any
) -> None:
    p.identity, d.identity = of_p, of_d
    router = await start_router()
    assert (await router.complete()).status_code == 200
    assert "hand_over" not in p.last.json["kv_transfer_params"]


async def test_hand_over_can_be_disabled(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    router = await start_router(first_token="decoder")
    await router.complete()
    await router.complete(max_tokens=1)
    assert "hand_over" not in p.last.json["kv_transfer_params"]
    assert len(generations(d)) == 2


async def test_prefiller_that_returns_no_tokens_is_decoded_as_usual(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    p.usual = prefilled(params=PROVEN)
    router = await start_router()
    assert (await router.complete()).status_code == 200
    assert given(d)[-1] == PROVEN
    assert router.metric("handed_over_total", outcome="no_token") == 1


@pytest.mark.parametrize(
    "choices", [[], [CHOICE, CHOICE], {}, None, [CHOICE | {"finish_reason": "x"}]]
)
async def test_invalid_prefill_answer_hands_over_nothing(
    start_router: StartRouter, p: MockEngine, d: MockEngine, choices: Any
) -> None:
    script = answering(200, ANSWER | {"choices": choices, "kv_transfer_params": HANDED})
    p.usual = script
    router = await start_router()
    assert (await router.complete()).status_code == 200
    assert given(d)[-1] == PROVEN


@pytest.mark.parametrize(
    "begun",
    [
        {},
        [1],
        BEGUN | {"output_token_ids": ""},
        BEGUN | {"output_token_ids": "BwAABwAA"},
        BEGUN | {"output_token_ids": [7]},
        BEGUN | {"output_token_ids": "B==="},
        BEGUN | {"prompt_token_ids": "AQAAAgA"},
        BEGUN | {"prompt_token_ids": ""},
    ],
)
async def test_invalid_generated_tokens_are_removed(
    start_router: StartRouter, p: MockEngine, d: MockEngine, begun: Any
) -> None:
    p.usual = prefilled(params=PROVEN | {"begun": begun})
    router = await start_router()
    assert (await router.complete()).status_code == 200
    assert given(d) == [PROVEN]
    assert router.metric("handed_over_total", outcome="no_token") == 1


async def test_generated_tokens_that_were_not_requested_are_removed(
    start_router: StartRouter, d: MockEngine
) -> None:
    router = await start_router(first_token="decoder")
    assert (await router.complete()).status_code == 200
    assert given(d) == [PROVEN]


async def test_token_that_a_decoder_rejects_is_computed_again(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    d.scripts = [refuses]
    assert (await router.complete()).status_code == 200
    assert given(d) == [HANDED, PROVEN]
    assert [one.get("hand_over", False) for one in given(p)] == [True, False]
    assert router.metric("handed_over_total", outcome="refused") == 1
    d.scripts = [refuses, refuses]
    assert (await router.complete()).status_code == 400


async def test_another_decoder_with_equal_hashes_continues(
    start_router: StartRouter, d: MockEngine, d2: MockEngine
) -> None:
    d2.identity = DECODES
    router = await start_router(ds=[d, d2])
    d.scripts = [fails]
    answers = [await router.complete() for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert all(params == HANDED for params in given(d) + given(d2))


async def test_another_decoder_with_other_hashes_gets_no_tokens(
    start_router: StartRouter, p: MockEngine, d: MockEngine, d2: MockEngine
) -> None:
    d2.identity = DECODES | {"renders": RENDERS | {"tokenizer": "9"}}
    router = await start_router(ds=[d, d2], health_interval=60)
    await d.stop()  # which refuses: P's blocks are surely unread
    answers = [await router.complete() for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    handed = [one.json["kv_transfer_params"].get("hand_over") for one in generations(p)]
    # The first or the second of them is planned for the one that is gone.
    assert handed in ([True, None], [None, True])
    assert given(d2) == [PROVEN, PROVEN]


@pytest.mark.parametrize(
    "body",
    [
        {"echo": True},
        {"thinking_token_budget": 5},
        {"min_tokens": "3"},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}, 3]}]},
    ],
)
def test_requests_that_cannot_be_handed_over(body: dict[str, Any]) -> None:
    assert not can_hand_over(body)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"response_format": {"type": "json_object"}, "tool_choice": "required", "tools": [{}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
        {"messages": ["absurd", {"content": None}], "min_tokens": 3, "echo": False},
    ],
)
def test_requests_that_can_be_handed_over(body: dict[str, Any]) -> None:
    assert can_hand_over(body)
