"""The server in front of the engine it is made for."""

from typing import Any

import httpx
import pytest

from engine_ext.reference.engine import ReferenceEngine
from tests.unit.reference.server.fake_engine import (
    events_of,
)

PATHS = ("/v1/completions", "/v1/chat/completions")
BODY: dict[str, Any] = {
    "prompt": "Once upon a time",
    "messages": [{"role": "user", "content": "Once upon a time"}],
    "max_tokens": 24,
    "temperature": 0,
    "ignore_eos": True,
}


ENGINE = {"num_blocks": 33}
MAX_LENGTH = 1024


def text_of(choice: dict[str, Any]) -> str:
    """Of either dialect, whole or chunk."""
    said = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
    return said["content"] or ""


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_and_a_whole_answer_are_the_same_tokens(
    path: str, client: httpx.AsyncClient
) -> None:
    body = {**BODY, "return_token_ids": True}
    (whole,) = (await client.post(path, json=body)).json()["choices"]
    chunks = events_of(await client.post(path, json={**body, "stream": True}))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(map(text_of, choices)) == text_of(whole)
    streamed = [token for choice in choices for token in choice.get("token_ids") or ()]
    assert streamed == whole["token_ids"]
    assert len(streamed) == 24
    assert whole["finish_reason"] == choices[-1]["finish_reason"] == "length"


async def test_a_prompt_seen_before_is_reported_as_cached(client: httpx.AsyncClient) -> None:
    body = {**BODY, "prompt": "x" * 100}
    usages = [(await client.post(PATHS[0], json=body)).json()["usage"] for _ in range(2)]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached == [0, 96]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_rejection_is_an_answer_without_tokens(
    path: str, stream: bool, client: httpx.AsyncClient, real_engine: ReferenceEngine
) -> None:
    body = {**BODY, "cache_hit_threshold": 0.5, "stream": stream}
    response = await client.post(path, json=body)
    assert response.status_code == 200
    answers = events_of(response) if stream else [response.json()]
    last = answers[-1]
    assert last["choices"][0]["finish_reason"] == "cache_threshold"
    assert last["choices"][0]["stop_reason"] == "cache_hit_rate=0.0000<0.5000"
    assert last["kv_transfer_params"] == {"cache_hit_rate": 0, "cache_hit_threshold": 0.5}
    assert "".join(text_of(answer["choices"][0]) for answer in answers) == ""
    if not stream:
        assert last["usage"]["completion_tokens"] == 0
    assert real_engine.stats().requests_finished == {"cache_threshold": 1}
    assert real_engine.stats().prompt_tokens_computed == 0
    assert real_engine.stats().num_blocks_free == real_engine.stats().num_blocks_total
