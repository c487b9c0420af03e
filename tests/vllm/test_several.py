"""Several answers to one prompt (`n`) inside vLLM: the children of one request read once."""

from typing import Any

from tests.integration.oracle import body_of, tokens_of
from tests.integration.processes import Server, metric, post_and_leave, wait_for
from tests.vllm.measures import COMPUTED, FETCHED, RUNNING, nothing_left
from tests.vllm.servers import Fleet

SAMPLED: dict[str, Any] = {"n": 3, "temperature": 0.8, "seed": 5, "logprobs": 2}
LENGTH = 200
"""Tokens, computed in one step by every engine here: on CPUs a seed in a prompt that takes several
ends vLLM 0.32 ("CPU Generator does not use offset")."""


def choices_of(server: Server, seed: int, **fields: Any) -> list[tuple[object, ...]]:
    body = body_of(tokens_of(LENGTH, seed), SAMPLED | fields)
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    choices = sorted(response.json()["choices"], key=lambda choice: int(choice["index"]))
    return [(each["token_ids"], each["text"], each["finish_reason"]) for each in choices]


def several_are_read_once(fleet: Fleet, prefiller: Server, decoder: Server, alone: Server) -> None:
    """And are those of one engine alone; nothing is left, also where the client leaves."""
    with fleet.router([prefiller], [decoder]) as router:

        def is_shared() -> bool:
            """Until a decoder has said that it can, it answers alone."""
            before = metric(decoder, FETCHED)
            choices_of(router, 20_000 + int(before), n=2, max_tokens=1)
            return metric(decoder, FETCHED) > before

        wait_for(is_shared, "its engines are known", 60)
        with nothing_left(prefiller, decoder):
            for seed in range(3):
                fetched, computed = metric(decoder, FETCHED), metric(decoder, COMPUTED)
                got = choices_of(router, 20_100 + seed)
                assert metric(decoder, FETCHED) - fetched in (LENGTH - 1, LENGTH)
                assert metric(decoder, COMPUTED) - computed <= 3 * 32
                assert got == choices_of(alone, 20_100 + seed)
            body = body_of(tokens_of(LENGTH, 20_200), SAMPLED | {"stream": True})
            with post_and_leave(router, body | {"max_tokens": 1000}, "several"):
                wait_for(lambda: metric(decoder, RUNNING) == 3, "all three run", 60)


def test_several_answers_are_those_of_one_vllm_and_are_read_once(
    fleet: Fleet, prefiller: Server, decoder: Server, alone: Server
) -> None:
    several_are_read_once(fleet, prefiller, decoder, alone)
