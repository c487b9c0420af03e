"""Answers in a given form, asked for as OpenAI's and langchain's clients do."""

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from engine_ext.reference.config import EngineConfig
from engine_ext.reference.engine import ReferenceEngine
from engine_ext.reference.grammar import MAX_GRAMMAR, GrammarCompiler
from engine_ext.reference.host import build_engine
from engine_ext.reference.model_config import read_model_config
from engine_ext.reference.server.job import ServedModel
from tests.unit.reference.server.fake_engine import (
    FakeEngine,
    events_of,
    in_process,
    saying,
    served_model,
    serving,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CHAT_MODEL = "DISAGG_TEST_CHAT_MODEL"
"""Variable that names the directory of a model that can talk; without it one test is skipped."""
ASKED = [{"role": "user", "content": "Anna is 31 years old and likes tea. Reply with JSON."}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "mood": {"enum": ["calm", "wild", "ünruly"]},
        "count": {"type": "integer", "minimum": 10, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
        "nested": {
            "type": "object",
            "properties": {"yes": {"type": "boolean"}},
            "required": ["yes"],
            "additionalProperties": False,
        },
    },
    "required": ["mood", "count", "tags", "nested"],
    "additionalProperties": False,
}
BY_SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
BODY: dict[str, Any] = {"messages": ASKED, "prompt": "Once", "max_tokens": 400, "temperature": 1.0}


@pytest.fixture
async def engine(directory: Path) -> AsyncIterator[ReferenceEngine]:
    engine = build_engine(EngineConfig(model=directory, num_blocks=65, num_threads=1))
    yield engine
    engine.check_integrity()
    engine.shutdown()


@pytest.fixture
async def client(directory: Path, engine: ReferenceEngine) -> AsyncIterator[httpx.AsyncClient]:
    model = served_model(directory, 2048)
    async with in_process(model, engine) as client:
        yield client


async def answer_to(client: httpx.AsyncClient, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    response = await client.post(path, json=BODY | fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_random_model_answers_by_the_schema(
    path: str, temperature: float, client: httpx.AsyncClient
) -> None:
    answer = await answer_to(client, path, response_format=BY_SCHEMA, temperature=temperature)
    (choice,) = answer["choices"]
    text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
    jsonschema.validate(json.loads(text), SCHEMA)
    assert choice["finish_reason"] == "stop"


async def test_each_of_several_answers_goes_its_own_way_by_the_schema(
    client: httpx.AsyncClient,
) -> None:
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
    answers = [
        await answer_to(client, response_format=BY_SCHEMA, seed=seed, **fields)
        for seed in range(3, 7)
    ]
    choices = [choice for answer in answers for choice in answer["choices"]]
    texts = [choice["message"]["content"] for choice in choices]
    for text, choice in zip(texts, choices, strict=True):
        jsonschema.validate(json.loads(text), SCHEMA)
        spelled = [bytes(entry["bytes"]) for entry in choice["logprobs"]["content"]]
        assert b"".join(spelled).decode().startswith(text)
    assert len(set(texts)) > 1


async def test_a_streamed_answer_is_the_whole_one_in_pieces(client: httpx.AsyncClient) -> None:
    fields: dict[str, Any] = {"response_format": BY_SCHEMA, "seed": 5}
    whole = await answer_to(client, **fields)
    response = await client.post(CHAT, json=BODY | fields | {"stream": True})
    pieces = [e["choices"][0]["delta"].get("content", "") for e in events_of(response)]
    assert "".join(pieces) == whole["choices"][0]["message"]["content"]
    assert len(pieces) > 5


async def test_a_stop_string_and_the_length_end_an_answer_in_the_middle(
    client: httpx.AsyncClient,
) -> None:
    answer = await answer_to(client, response_format=BY_SCHEMA, stop=['"count"'])
    assert answer["choices"][0]["stop_reason"] == '"count"'
    answer = await answer_to(client, response_format=BY_SCHEMA, max_tokens=3)
    assert answer["choices"][0]["message"]["content"] == '{"m'
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_min_tokens_and_ignore_eos_do_not_break_the_form(client: httpx.AsyncClient) -> None:
    wanted: dict[str, Any] = {"response_format": _named({"enum": ["yes", "no"]}), "max_tokens": 12}
    oddities: tuple[dict[str, Any], ...] = (
        {"min_tokens": 9},
        {"ignore_eos": True},
    )
    for fields in oddities:
        answer = await answer_to(client, **wanted, **fields)
        assert answer["choices"][0]["message"]["content"] in ('"yes"', '"no"')


async def test_any_object_is_an_object(client: httpx.AsyncClient) -> None:
    answer = await answer_to(client, response_format={"type": "json_object"}, max_tokens=20)
    assert answer["choices"][0]["message"]["content"].startswith("{")


async def test_requests_of_any_form_share_a_batch(client: httpx.AsyncClient) -> None:
    free: dict[str, Any] = {"ignore_eos": True, "max_tokens": 60, "temperature": 0}
    alone = await answer_to(client, **free)
    answers = await asyncio.gather(
        answer_to(client, response_format=BY_SCHEMA, seed=1),
        answer_to(client, **free),
        answer_to(client, response_format=_named({"type": "string", "pattern": "^[ab]{30}$"})),
    )
    jsonschema.validate(json.loads(answers[0]["choices"][0]["message"]["content"]), SCHEMA)
    assert answers[1]["choices"] == alone["choices"]
    assert re.fullmatch('"[ab]{30}"', answers[2]["choices"][0]["message"]["content"])


def _named(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


def _deep(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "wanted",
    [
        {"response_format": {"type": "xml"}},
        {"response_format": {}},
        {"response_format": {"type": ["text"]}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": 7}},
        {"response_format": _named(None)},
        {"response_format": _named([])},
        {"response_format": _named({"type": "nothing"})},
        {"response_format": _named({"$ref": "#/nowhere"})},
        {"response_format": _named({"type": "string", "pattern": "("})},
        {"response_format": _named({"not": {}})},
        {"response_format": _named({"enum": ["x" * MAX_GRAMMAR]})},
        {"response_format": _named(_deep(450))},
        {"response_format": _named({"minimum": 5, "maximum": 4, "type": "integer"})},
    ],
    ids=lambda wanted: str(wanted)[:60],
)
@pytest.mark.parametrize("max_tokens", [1, 100])
async def test_a_form_that_makes_no_sense_is_refused_before_anything_is_computed(
    wanted: dict[str, Any], max_tokens: int, model: ServedModel, engine: FakeEngine
) -> None:
    fake = FakeEngine(saying("a"))
    async with in_process(model, fake) as client:
        response = await client.post(CHAT, json=BODY | wanted | {"max_tokens": max_tokens})
    error = response.json()["error"]
    assert response.status_code == 400, response.text
    assert error["param"] in (next(iter(wanted)), None)
    assert "\n" not in error["message"]
    assert len(error["message"]) < 500
    assert fake.requests == []


class Person(BaseModel):
    name: str
    age: int


@pytest.mark.skipif(CHAT_MODEL not in os.environ, reason=f"{CHAT_MODEL} names no model")
async def test_a_model_that_talks_fills_in_what_openais_client_asks_for() -> None:
    directory = Path(os.environ[CHAT_MODEL])
    config = read_model_config(directory)
    served = served_model(directory, 2048)
    compiler = GrammarCompiler(
        served.tokenizer.backend.to_str(),
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
    )
    served = replace(served, vocab_size=config.vocab_size, grammars=compiler)
    engine = build_engine(EngineConfig(model=directory))
    try:
        async with serving(served, engine) as running:
            url = f"http://127.0.0.1:{running.port}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="x") as client:
                completion = await client.chat.completions.parse(
                    model="tiny",
                    messages=[{"role": "user", "content": ASKED[0]["content"]}],
                    response_format=Person,
                    temperature=0,
                    max_tokens=60,
                )
    finally:
        engine.shutdown()
    assert completion.choices[0].message.parsed == Person(name="Anna", age=31)
