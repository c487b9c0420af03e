"""The pull flow, through a real router to engines on real sockets."""

import json

import openai

from scripts.mock_engine import MockEngine
from tests.unit.router.harness import Router
from tests.unit.router.mock_engine import PARAMS, USUAL

# vLLM's KvHintsEnvelope, by the name that its engines have for it.
HINTS = {
    "protocol_version": "1",
    "message_id": "1",
    "actions": [{"action_id": "1", "action_type": "x", "action_version": "1", "payload": {"a": 1}}],
}


async def test_the_prefiller_is_asked_for_one_token_and_to_keep_its_blocks(
    router: Router, p: MockEngine
) -> None:
    await router.complete(
        max_completion_tokens=9,
        min_tokens=3,
        min_completion_tokens=3,
        stream=True,
        stream_options={"include_usage": True},
        n=1,
        logit_bias={"5": 1.5},
        seed=2**63,
        kv_hints=HINTS,
    )
    assert p.last.json == {
        "model": "m",
        "prompt": "hello",
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "stream": False,
        "cache_hit_threshold": 0,
        "logit_bias": {"5": 1.5},
        "seed": 2**63,
        "kv_hints": HINTS,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }


async def test_the_decoder_gets_the_request_and_the_prefillers_params_and_keeps_nothing(
    router: Router, d: MockEngine
) -> None:
    answer = await router.complete(min_tokens=3, kv_hints=HINTS)
    assert answer.status_code == 200
    assert answer.json() == USUAL
    assert d.last.json == {
        "model": "m",
        "prompt": "hello",
        "max_tokens": 7,
        "min_tokens": 3,
        "kv_hints": HINTS,
        "cache_hit_threshold": 0,
        "kv_transfer_params": {**PARAMS, "retain": False},
    }


async def test_the_openai_client_completes_and_streams(router: Router) -> None:
    async with openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="k") as client:
        whole = await client.completions.create(model="m", prompt="hello")
        assert whole.choices[0].text == "x"
        stream = await client.completions.create(model="m", prompt="hello", stream=True)
        assert [part.choices[0].text async for part in stream] == ["a", "b"]


async def test_a_stream_ends_as_the_decoder_ended_it(router: Router) -> None:
    answer = await router.stream()
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.text.endswith("data: [DONE]\n\n")
    first = json.loads(answer.text.split("\n\n")[0].removeprefix("data: "))
    assert first["choices"][0]["text"] == "a"
