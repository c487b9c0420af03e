"""Engines of other KV protocols than the NixlConnector's: what their pages show, what each gets,
and what it refuses. Their scripts refuse what the real engines refuse."""

import asyncio
import json
from typing import Any

import pytest

from scripts.mock_engine import DONE, MockEngine, Peer, Received
from tests.conftest import find_free_ports
from tests.unit.router.conftest import StartRouter
from tests.unit.router.conversations.test_turns import ASKED, chat
from tests.unit.router.engine_scripts import fails, refuses, usual_decode, usual_prefill
from tests.unit.router.harness import eventually
from tests.unit.router.mock_engine import USUAL, event, running_engine

# Fields of CompletionRequest and ChatCompletionRequest that clients of these tests send, and those
# of disaggregated serving, in NVIDIA/TensorRT-LLM tensorrt_llm/serve/openai_protocol.py (November
# 2026). Its models forbid all others.
TRTLLM_FIELDS = {
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "min_tokens", "n",
    "stream", "stream_options", "temperature", "disaggregated_params", "prompt_token_ids",
}  # fmt: skip
CONTEXT_PARAMS = frozenset(("request_type", "disagg_request_id"))
OPAQUE = {"encoded_opaque_state": "AAEC", "first_gen_tokens": [7], "ctx_dp_rank": 0}
PROMPT_IDS = [1, 2, 3]


async def refuse(peer: Peer, what: str) -> None:
    await peer.answer({"object": "error", "message": what, "type": "BadRequestError"}, 400)


class TensorRTLLM:
    """A context server and a generation server of TensorRT-LLM."""

    def __init__(self, context: MockEngine, generation: MockEngine) -> None:
        self.waiting: set[int] = set()
        """The ids of KV that the context server holds."""
        self.finish = "length"
        context.usual, generation.usual = self.prefill, self.decode
        for engine in (context, generation):
            engine.listing = self.models

    async def models(self, request: Received, peer: Peer) -> None:
        card = {"id": "m", "object": "model", "created": 1, "owned_by": "tensorrt_llm"}
        await peer.answer({"object": "list", "data": [card]})

    async def prefill(self, request: Received, peer: Peer) -> None:
        body, params = request.json, request.json.get("disaggregated_params", {})
        if unknown := set(body) - TRTLLM_FIELDS or set(params) - CONTEXT_PARAMS:
            return await refuse(peer, f"Extra inputs are not permitted: {unknown}")
        if params.get("request_type") != "context_only" or body.get("stream"):
            return await refuse(peer, "no context request")
        number = params["disagg_request_id"]
        assert 2**42 <= number < 2**63
        assert number not in self.waiting
        self.waiting.add(number)
        content: dict[str, Any] = {**USUAL, "prompt_token_ids": PROMPT_IDS}
        if "messages" in body:
            message = {"role": "assistant", "content": "a"}
            content |= {"object": "chat.completion", "choices": [{"index": 0, "message": message}]}
        held = {**params, **OPAQUE, "ctx_request_id": number}
        (choice,) = content["choices"]
        choice = {**choice, "finish_reason": self.finish, "disaggregated_params": held}
        await peer.answer({**content, "choices": [choice]})

    async def decode(self, request: Received, peer: Peer) -> None:
        body = request.json
        if unknown := set(body) - TRTLLM_FIELDS:
            return await refuse(peer, f"Extra inputs are not permitted: {unknown}")
        params = body.get("disaggregated_params")
        if params is not None:
            assert params["request_type"] == "generation_only"
            assert OPAQUE.items() <= params.items()
            assert params["ctx_request_id"] == params["disagg_request_id"]
            self.waiting.remove(params["ctx_request_id"])
            assert body.get("prompt_token_ids") == (PROMPT_IDS if "messages" in body else None)
        await usual_decode(request, peer)


@pytest.fixture
def trtllm(p: MockEngine, d: MockEngine) -> TensorRTLLM:
    return TensorRTLLM(p, d)


@pytest.mark.parametrize("stream", [False, True])
async def test_trtllm_context_server_computes_the_prompt_and_generation_server_continues(
    start_router: StartRouter, p: MockEngine, d: MockEngine, trtllm: TensorRTLLM, stream: bool
) -> None:
    router = await start_router()
    for number in range(1, 3):
        answer = await router.complete(stream=stream, min_tokens=2)
        assert answer.status_code == 200
        assert "disaggregated_params" not in answer.text
        assert len(p.requests) == len(d.requests) == number
        assert p.last.json["max_tokens"] == 7
    await chat(router, ASKED)
    assert not trtllm.waiting
    labels = {"endpoint": "/v1/completions", "flow": "trtllm", "status": "200", "outcome": "ok"}
    await eventually(lambda: router.metric("requests_total", **labels) == 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_trtllm_answer_that_ends_with_the_first_token_is_the_context_servers(
    start_router: StartRouter, d: MockEngine, trtllm: TensorRTLLM, stream: bool
) -> None:
    router, trtllm.finish = await start_router(), "stop"
    answer = await router.complete(stream=stream)
    assert answer.status_code == 200
    assert not d.requests
    assert "x" in answer.text
    assert "disaggregated_params" not in answer.text
    assert str(PROMPT_IDS) not in answer.text.replace(" ", "").replace(",", ", ")


@pytest.mark.parametrize("several", [{"n": 2}, {"prompt": ["a", "b"]}])
async def test_trtllm_generation_server_computes_what_cannot_be_shared(
    start_router: StartRouter,
    p: MockEngine,
    d: MockEngine,
    trtllm: TensorRTLLM,
    several: dict[str, Any],
) -> None:
    router = await start_router()
    assert (await router.complete(**several)).status_code == 200
    assert (len(p.requests), len(d.requests)) == (0, 1)


async def test_failed_decode_leg_is_a_new_transfer(
    start_router: StartRouter, p: MockEngine, d: MockEngine, d2: MockEngine, trtllm: TensorRTLLM
) -> None:
    d2.usual, d2.listing = trtllm.decode, trtllm.models
    router = await start_router(ds=[d, d2])
    d.scripts.append(fails)
    answers = [await router.complete() for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200] * 4
    assert not d.scripts
    ids = [request.json["disaggregated_params"]["disagg_request_id"] for request in p.requests]
    assert len(set(ids)) == len(ids) == 5
    assert len(trtllm.waiting) == 1  # of the leg that failed: TensorRT-LLM frees it itself


async def test_context_servers_answer_without_params_is_a_failure(
    start_router: StartRouter, p: MockEngine, p2: MockEngine, trtllm: TensorRTLLM
) -> None:
    p2.listing, p2.usual = trtllm.models, usual_prefill
    router = await start_router(ps=[p2, p])
    answers = [await router.complete() for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200] * 2
    assert p2.requests
    assert router.metric("retries_total", kind="broken_answer", role="prefill") == 1


async def test_engines_of_a_store_get_no_params_and_no_engine_is_blamed(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    async def prefill(request: Received, peer: Peer) -> None:
        body = request.json
        if body["max_tokens"] != 1 or "kv_transfer_params" in body or body["stream"]:
            return await refuse(peer, "not the first leg of a store")
        await peer.answer(USUAL)

    async def decode(request: Received, peer: Peer) -> None:
        if "kv_transfer_params" in request.json:
            return await refuse(peer, "not the second leg of a store")
        await usual_decode(request, peer)

    p.usual, d.usual = prefill, decode
    router = await start_router(kv_protocol="store")
    for stream in (False, True):
        assert (await router.complete(stream=stream)).status_code == 200
    assert (len(p.requests), len(d.requests)) == (2, 2)
    assert d.last.json["max_tokens"] == 7
    assert not router.metric("prefill_without_params_total")


# MooncakeConnector: its real engines are in tests/vllm/test_mooncake.py.


def workers(*ids: str) -> dict[str, Any]:
    """The page of its bootstrap server."""
    addresses = {"0": {"0": "tcp://10.9.8.7:1"}}
    return {str(n): {"engine_id": one, "worker_addr": addresses} for n, one in enumerate(ids)}


async def test_mooncakes_prefill_engine_is_found_by_its_bootstrap_server(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    async def prefill(request: Received, peer: Peer) -> None:
        params = request.json["kv_transfer_params"]
        assert set(params) == {"do_remote_decode", "do_remote_prefill", "transfer_id"}
        assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
        assert (request.json["max_tokens"], request.json["min_tokens"]) == (1, 1)
        await peer.answer({**USUAL, "kv_transfer_params": None})

    async with running_engine(usual_prefill) as bootstrap:
        bootstrap.pages["/query"] = json.dumps(workers("id-0", "id-1")).encode()
        p.usual = prefill
        router = await start_router(bootstrap_port=bootstrap.port)
        given = []
        for _ in range(2):
            assert (await router.complete(stop=["x"])).status_code == 200
            given.append((p.last.header("x-data-parallel-rank"), d.last.json["kv_transfer_params"]))
            assert p.last.json["kv_transfer_params"]["transfer_id"] == given[-1][1]["transfer_id"]
        assert {(rank, one["remote_engine_id"]) for rank, one in given} == {
            ("0", "id-0"),
            ("1", "id-1"),
        }
        addresses = {one["remote_bootstrap_addr"] for _, one in given}
        assert addresses == {f"http://127.0.0.1:{bootstrap.port}"}
        assert len({one["transfer_id"] for _, one in given}) == 2


async def test_kv_of_a_mooncake_transfer_whose_decode_engine_is_gone_is_read_by_another(
    start_router: StartRouter, p: MockEngine, d: MockEngine, d2: MockEngine
) -> None:
    async with running_engine(usual_prefill) as bootstrap:
        bootstrap.pages["/query"] = json.dumps(workers("id-0")).encode()
        p.usual = lambda request, peer: peer.answer(USUAL)
        router = await start_router(ds=[d, d2], bootstrap_port=bootstrap.port)

        async def reset(request: Received, peer: Peer) -> None:
            peer.reset()

        d.usual = reset
        while not d.requests:
            assert (await router.complete()).status_code == 200
        lost = d.last.json["kv_transfer_params"]["transfer_id"]

        def released() -> list[Received]:
            given = [r for r in d2.requests if r.json.get("prompt") == [1]]
            return [r for r in given if r.json["kv_transfer_params"]["transfer_id"] == lost]

        await eventually(released)
        assert len(released()) == 1


async def test_mooncake_prefill_whose_client_leaves_is_not_aborted_but_read(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    asked, left = asyncio.Event(), asyncio.Event()

    async def end_late(request: Received, peer: Peer) -> None:
        asked.set()
        await left.wait()
        with pytest.raises(TimeoutError):  # the router has not hung up
            await asyncio.wait_for(peer.wait_left(), 0.2)
        await peer.answer(USUAL)

    async with running_engine(usual_prefill) as bootstrap:
        bootstrap.pages["/query"] = json.dumps(workers("id-0")).encode()
        p.usual = end_late
        router = await start_router(bootstrap_port=bootstrap.port)
        asking = asyncio.create_task(router.complete())
        await asked.wait()
        asking.cancel()
        await asyncio.wait((asking,))
        left.set()
        await eventually(lambda: d.requests)
    (release,) = d.requests
    sent = p.last.json["kv_transfer_params"]["transfer_id"]
    assert release.json["kv_transfer_params"]["transfer_id"] == sent
    assert release.json["prompt"] == [1]


@pytest.mark.parametrize(
    "page",
    [b"", b"[]", b"{}", b'{"0": {}}', b'{"0": {"engine_id": 7, "worker_addr": {}}}', b"\xff"],
)
async def test_what_is_no_bootstrap_servers_page_makes_no_mooncake(
    start_router: StartRouter, p: MockEngine, d: MockEngine, page: bytes
) -> None:
    async with running_engine(usual_prefill) as bootstrap:
        bootstrap.pages["/query"] = page
        router = await start_router(bootstrap_port=bootstrap.port)
        assert (await router.complete()).status_code == 200
        assert router.engine(p).kv_protocol == "nixl"
        assert d.last.json["kv_transfer_params"]["remote_block_ids"]


async def test_configured_mooncake_without_its_bootstrap_server_computes_at_the_decode_engine(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    (free,) = find_free_ports(1)
    router = await start_router(
        kv_protocol="mooncake", bootstrap_port=free, without_prefiller="decode"
    )
    assert (await router.complete()).status_code == 200
    assert not p.requests
    assert "kv_transfer_params" not in d.last.json


async def test_turn_of_a_conversation_is_served_without_reuse(
    start_router: StartRouter, trtllm: TensorRTLLM
) -> None:
    router = await start_router()
    for _ in range(2):
        await chat(router, ASKED)


async def test_refusal_of_either_engine_is_the_clients_answer(
    start_router: StartRouter, p: MockEngine, d: MockEngine, trtllm: TensorRTLLM
) -> None:
    router = await start_router()
    p.scripts.append(refuses)
    assert (await router.complete()).status_code == 400
    assert not d.requests
    d.scripts.append(refuses)
    assert (await router.complete()).status_code == 400


async def test_engines_of_different_protocols_are_no_pair(
    start_router: StartRouter, d: MockEngine, d2: MockEngine, trtllm: TensorRTLLM
) -> None:
    router = await start_router(ds=[d, d2])
    for _ in range(4):
        assert (await router.complete()).status_code == 200
    assert len(d.requests) == 4
    assert not d2.requests


async def test_stream_that_breaks_off_is_not_begun_again(
    start_router: StartRouter, p: MockEngine, d: MockEngine, trtllm: TensorRTLLM
) -> None:
    async def break_off(request: Received, peer: Peer) -> None:
        await peer.stream(event("a"))

    d.scripts.append(break_off)
    answer = await (await start_router()).complete(stream=True)
    assert "error" in answer.text
    assert DONE.decode() not in answer.text.partition("error")[0]
    assert len(p.requests) == 1
