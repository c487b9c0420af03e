"""LoRA adapters: their keys and values move, and are taken for no other model's."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration.legs import decode, prefill
from tests.integration.oracle import Answer, Prompt, complete, differences, tokens_of
from tests.integration.processes import Server, metric
from tests.integration.talk import turns
from tests.vllm.adapters import write_adapter
from tests.vllm.measures import COMPUTED, FETCHED, nothing_left
from tests.vllm.servers import OURS, SCHEDULER, UNCACHED, Fleet, Kind, Kinds

ADAPTERS = ("first", "second")
MODELS = ("tiny", *ADAPTERS)
LENGTHS = (31, 32, 33, 300, 700)


def with_adapters(folder: Path) -> Kinds:
    named = [f"{name}={write_adapter(folder / name, at)}" for at, name in enumerate(ADAPTERS)]
    lora = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules", *named)
    options = (*SCHEDULER, *lora)
    return Kind("lora-p", OURS, (*options, UNCACHED)), Kind("lora-d", OURS, options)


PAIR = with_adapters


def split(pair: list[Server], prompt: Prompt, at: str, then: str) -> Answer:
    """Prefilled as one model, decoded as another."""
    prefiller, decoder = pair
    params = prefill(prefiller, prompt, model=at)
    return decode(decoder, prompt, params, model=then).answer


@pytest.mark.parametrize("model", MODELS)
def test_an_adapters_prompts_are_those_of_one_engine_alone(pair: list[Server], model: str) -> None:
    prefiller, decoder = pair
    computed = metric(decoder, COMPUTED)
    with nothing_left(*pair):
        for length in LENGTHS:
            prompt = tokens_of(length, 9400 + length)
            right = complete(prefiller, prompt, model=model)
            assert differences([right], [split(pair, prompt, model, model)]) == [], length
    assert metric(decoder, COMPUTED) - computed <= len(LENGTHS), "it was moved, not computed again"


def test_an_adapters_keys_and_values_are_taken_for_no_other_models(pair: list[Server]) -> None:
    prefiller, decoder = pair
    prompt = tokens_of(300, 9500)
    right = [complete(prefiller, prompt, model=model) for model in MODELS]
    assert len({answer.tokens[:3] for answer in right}) == len(MODELS), "a wrong one would be seen"
    fetched = metric(decoder, FETCHED)
    with nothing_left(*pair):
        for at in MODELS:
            for then, answer in zip(MODELS, right, strict=True):
                if at != then:
                    assert differences([answer], [split(pair, prompt, at, then)]) == [], (at, then)
    assert metric(decoder, FETCHED) == fetched


def test_models_page_names_the_parent_of_adapters_by_which_a_router_knows_them(
    pair: list[Server],
) -> None:
    for server in pair:
        models = server.get("/v1/models").json()["data"]
        parents = {model["id"]: model["parent"] for model in models}
        assert parents == {"tiny": None, "first": "tiny", "second": "tiny"}


def test_a_conversation_that_changes_its_adapter(fleet: Fleet, pair: list[Server]) -> None:
    """Through the router, whose conversations are each model's own; and both adapters at once: a
    request of the model itself in their batch is answered wrongly by one vLLM alone, on CPUs."""
    prefiller, decoder = pair
    prompt = tokens_of(200, 9600)
    with fleet.router([prefiller], [decoder]) as router:
        with nothing_left(*pair), ThreadPoolExecutor(len(ADAPTERS)) as pool:
            got = list(pool.map(lambda model: complete(router, prompt, model=model), ADAPTERS))
        right = [complete(prefiller, prompt, model=model) for model in ADAPTERS]
        assert differences(right, got) == []
        asked = prompt
        for at, model in enumerate(("first", "first", "second", "tiny", "first")):
            answer = complete(router, asked, model=model, conversation_id="adapters")
            assert differences([complete(prefiller, asked, model=model)], [answer]) == [], at
            asked = [*asked, *answer.tokens, *tokens_of(20, 9700 + at)]
        assert turns(router, "hit") == 1, "only the second asks the same as the one before"
