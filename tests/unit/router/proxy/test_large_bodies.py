"""Large bodies are read as small ones are, and other requests are answered between their steps."""

import asyncio

import orjson
import pytest

from router.proxy.large_bodies import PIECE_BYTES, Pacer, read_long_ids
from router.proxy.messages import encode_body
from router.proxy.request import parse_body
from scripts.mock_engine import MockEngine
from tests.unit.router.harness import Router

IDS = range(100_000, 300_000)
NUMBERS = ",".join(map(str, IDS))
# With a comma at its end where a piece ends.
WIDE = "1," * 600_000 + "1" + " " * PIECE_BYTES


@pytest.mark.parametrize(
    "numbers", [NUMBERS, NUMBERS.replace(",", ",\n "), f"{NUMBERS},1.50,-0,1e5"]
)
@pytest.mark.parametrize("field", ["prompt", "token_ids"])
async def test_a_long_list_of_ids_is_read_as_by_the_parser(field: str, numbers: str) -> None:
    raw = f'{{"model":"m", "{field}" : [{numbers}],"top_p":0.10,"n":1}}'.encode()
    found = await read_long_ids(raw, Pacer())
    assert found is not None
    expected = parse_body(raw)
    assert list(found.body) == list(expected)
    assert encode_body(found.body) == encode_body(expected)
    written = encode_body(found.writable({**found.body, "n": 2}))
    assert orjson.loads(written) == {**orjson.loads(raw), "n": 2}
    assert found.writable({field: [1]}) == {field: [1]}, "the ids are others"


@pytest.mark.parametrize(
    "text",
    [
        f'{{"prompt":[{NUMBERS},]}}',
        f'{{"prompt":[{WIDE},]}}',
        f'{{"prompt":[0{NUMBERS}]}}',
        f'{{"prompt":[{NUMBERS} 1]}}',
        f'{{"prompt":[{NUMBERS}',
        f'{{"prompt":[{NUMBERS}]',
        f'{{"prompt":[{NUMBERS},"]"]}}',
        f'{{"prompt":[{NUMBERS},[1]]}}',
        f'{{"prompt":[{NUMBERS}],"prompt":[1]}}',
        f'{{"prompt":[1],"prompt":[{NUMBERS}]}}',
        f'{{"a":{{"prompt":[{NUMBERS}]}}}}',
        f'{{"a":"\\"prompt\\":[{NUMBERS}]"}}',
        f'[{{"prompt":[{NUMBERS}]}}]',
        f'{{"prompt":"{NUMBERS}"}}',
    ],
    ids=range(14),
)
async def test_every_other_body_is_left_to_the_parser(text: str) -> None:
    assert await read_long_ids(text.encode(), Pacer()) is None


async def test_large_steps_do_not_share_a_pass_of_the_loop() -> None:
    loop, pacer = asyncio.get_running_loop(), Pacer()
    passes, steps = 0, list[int]()

    def count() -> None:
        nonlocal passes
        passes += 1
        if len(steps) < 12:
            loop.call_soon(count)

    async def take_steps() -> None:
        for _ in range(3):
            await pacer.turn()
            steps.append(passes)

    count()
    await asyncio.gather(*(take_steps() for _ in range(4)))
    assert sorted(set(steps)) == steps
    assert len(steps) == 12


async def test_both_engines_get_the_same_long_ids(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    raw = f'{{"model":"m","max_tokens":3,"prompt":[{NUMBERS}]}}'.encode()
    headers = {"content-type": "application/json"}
    answer = await router.client.post("/v1/completions", content=raw, headers=headers)
    assert answer.status_code == 200
    assert p.last.json["prompt"] == d.last.json["prompt"] == list(IDS)
    assert (p.last.json["max_tokens"], d.last.json["max_tokens"]) == (1, 3)
