"""Push with other attention than most models have: latent; windows, or chunks, beside full."""

import pytest

from tests.integration.legs import prefill_body
from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import metric, wait_for
from tests.vllm.chunked_model import write_chunked_model
from tests.vllm.hybrid_model import write_hybrid_model
from tests.vllm.measures import COMPUTED, counted, freed
from tests.vllm.mla_model import BACKEND, write_mla_model
from tests.vllm.servers import PUSH, Fleet, Writer, chunking_pair
from tests.vllm.test_push import both_legs, registered

LENGTHS = (1, 33, 64, 96, 129, 500, 1500)
ENDING = (95, 127, 159, 255)
"""The last token's window of the hybrid model begins with the last token of a block."""


@pytest.mark.parametrize(
    ("name", "write", "lengths", "is_early", "options"),
    [
        ("hybrid", write_hybrid_model, (*LENGTHS, *ENDING), True, ()),
        pytest.param(
            "chunked", write_chunked_model, (*LENGTHS, *ENDING), True, (), marks=pytest.mark.nightly
        ),
        # vLLM's CPU build computes a prompt in one step there, so all is written at its end.
        ("mla", write_mla_model, LENGTHS, False, BACKEND),
    ],
)
def test_pushed_prompts_and_a_turn_are_those_of_one_engine_alone(
    fleet: Fleet,
    name: str,
    write: Writer,
    lengths: tuple[int, ...],
    is_early: bool,
    options: tuple[str, ...],
) -> None:
    kinds = chunking_pair(f"{name}-push", PUSH, write, *options)
    with fleet.servers(*kinds) as (prefiller, decoder):
        for length in lengths:
            prompt = tokens_of(length, 7600 + length)
            right = complete(prefiller, prompt)
            turn = both_legs(prefiller, decoder, prompt)
            assert differences([right], [turn.answer]) == [], length
        prompt = tokens_of(1500, 7650)
        with registered(prefiller, decoder, prompt) as (request_id, leg):
            prefiller.post("/v1/completions", prefill_body(prompt), request_id)
            assert leg.result(timeout=60).status_code == 200
        # The prompt of one token may have nothing to move.
        wait_for(lambda: counted(prefiller, "pushes_ok") >= len(lengths), "all were pushed")
        assert (counted(prefiller, "early_blocks") > 0) is is_early
        prompt = tokens_of(300, 7700)
        turn = both_legs(prefiller, decoder, prompt)
        longer = [*prompt, *turn.answer.tokens, *tokens_of(50, 7701)]
        right = complete(prefiller, longer)
        before = metric(prefiller, COMPUTED)
        again = both_legs(prefiller, decoder, longer, turn.params)
        assert differences([right], [again.answer]) == []
        assert metric(prefiller, COMPUTED) - before < len(longer), "the turn was pulled"
        wait_for(lambda: freed(prefiller), "P has its blocks back")
