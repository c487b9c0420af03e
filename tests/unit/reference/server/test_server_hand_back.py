"""Answers that an engine without room hands back, as a router sees them."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from engine_ext.reference.engine import ReferenceEngine
from tests.unit.reference.server.test_server_begun import (
    BODY,
    FORMS,
    PATHS,
    Told,
    entries_of,
    in_dialect,
    rounded,
    stream,
)

ASKED: dict[str, Any] = {"kv_transfer_params": {"hand_back": True}}
LONG = {"max_tokens": 150}
FEW = 12
"""Blocks of 32 tokens: two long answers do not fit."""


ENGINE = {"num_blocks": FEW, "enable_prefix_caching": False}
MAX_LENGTH = 352


@pytest.fixture(autouse=True)
def every_block_came_back(real_engine: ReferenceEngine) -> Iterator[None]:
    yield
    stats = real_engine.stats()
    assert stats.num_blocks_free == stats.num_blocks_total
    assert stats.preemptions > 0


def is_back(choice: dict[str, Any]) -> bool:
    reason = (choice["finish_reason"], choice.get("stop_reason"))
    return reason == ("cache_threshold", "preempted")


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", ["plain", "logprobs", "ids for names", "seeded"])
async def test_whole_answers_tell_where_to_go_on(
    path: str, form: str, client: httpx.AsyncClient
) -> None:
    body = in_dialect(path, BODY | FORMS[form]) | LONG
    alone = (await client.post(path, json=body)).json()["choices"][0]
    asking = [client.post(path, json=body | ASKED) for _ in range(3)]
    answers = [response.json() for response in await asyncio.gather(*asking)]
    back = [one for one in answers if is_back(one["choices"][0])]
    assert back
    for answer in back:
        (choice,) = answer["choices"]
        count = len(choice["token_ids"])
        assert choice["token_ids"] == alone["token_ids"][:count]
        known = entries_of(choice["logprobs"])
        assert rounded(known) == rounded(entries_of(alone["logprobs"])[:count])
        given = {"kv_transfer_params": answer["kv_transfer_params"]}
        rest = (await client.post(path, json=body | given)).json()["choices"][0]
        assert rounded(rest) == rounded(alone)
    whole = [one for one in answers if one not in back]
    assert all(rounded(one["choices"][0]) == rounded(alone) for one in whole)


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_ends_with_the_reason_alone(path: str, client: httpx.AsyncClient) -> None:
    body = BODY | LONG
    alone = Told().hear(await stream(client, path, body))
    streams = await asyncio.gather(*(stream(client, path, body | ASKED) for _ in range(3)))
    assert all("kv_transfer_params" not in chunk for chunks in streams for chunk in chunks)
    told = [Told().hear(chunks) for chunks in streams]
    back = [one for one in told if one.finishes == [("cache_threshold", "preempted")]]
    assert back
    for one in back:
        assert one.tokens == alone.tokens[: len(one.tokens)]
        assert alone.text.startswith(one.text)


async def test_what_is_no_boolean_is_refused(client: httpx.AsyncClient) -> None:
    (path, _) = PATHS
    wrong: list[Any] = [1, "yes", []]
    for value in wrong:
        asked = {"kv_transfer_params": {"hand_back": value}}
        assert (await client.post(path, json=BODY | asked)).status_code == 400
    asking = [client.post(path, json=BODY | LONG) for _ in range(3)]
    assert {response.status_code for response in await asyncio.gather(*asking)} == {200}
