"""Latent attention pushed between an engine of one tensor-parallel rank and one of two: every rank
has the whole latent, of one is written, to each."""

import pytest

from tests.integration.oracle import differences, tokens_of
from tests.integration.processes import metric
from tests.vllm.measures import FETCHED, nothing_left
from tests.vllm.mla_model import BACKEND, write_mla_model
from tests.vllm.servers import PUSH, SCHEDULER, Fleet, Kind
from tests.vllm.test_mla import LENGTHS, Right, right  # noqa: F401 # its fixture
from tests.vllm.test_push import both_legs

pytestmark = pytest.mark.nightly


def test_either_way_prompts_are_those_of_one_vllm_alone(
    fleet: Fleet,
    right: Right,  # noqa: F811
) -> None:
    options = (*SCHEDULER, *BACKEND)
    kinds = (
        Kind("mla-push-one", PUSH, options, write_mla_model),
        Kind("mla-push-ranks", PUSH, (*options, "--tensor-parallel-size", "2"), write_mla_model),
    )
    with fleet.servers(*kinds) as (one, ranks):
        for first, second in ((one, ranks), (ranks, one)):
            before = metric(second, FETCHED)
            with nothing_left(first):
                for length in LENGTHS:
                    prompt = tokens_of(length, length)
                    turn = both_legs(first, second, prompt)
                    assert differences([right[tuple(prompt)]], [turn.answer]) == [], length
            assert metric(second, FETCHED) - before == sum(LENGTHS) - 1
