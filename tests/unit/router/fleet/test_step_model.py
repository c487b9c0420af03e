"""The time of an engine's steps by its identity page, whose content may be anything."""

import math
from typing import Any

import pytest

from router.fleet.capabilities import EngineCapabilities
from router.fleet.step_model import StepModel

PAGE = {
    "base_ms": 10.0,
    "token_us": 50.0,
    "token_context_ns": 2.0,
    "context_ns": 30.0,
    "steps": 1234,
}


def capabilities(*ranks: object) -> EngineCapabilities:
    made = EngineCapabilities()
    made.note_identity({"ranks": list(ranks)})
    return made


def test_step_time_has_the_units_of_the_page() -> None:
    model = StepModel.parse(PAGE)
    assert model is not None
    assert model.decode_step(0) == pytest.approx(0.010)
    assert model.decode_step(100_000) == pytest.approx(0.013)
    # 10 ms + 256 * (50 us + 2 ns * 10,000) + 3 ms
    assert model.worst_step(256, 10_000, 100_000) == pytest.approx(0.03092)


def test_prefill_takes_a_step_for_each_chunk() -> None:
    model = StepModel.parse(PAGE)
    assert model is not None
    # 1,000 tokens of 50 us, at a mean context of 500
    assert model.prefill_seconds(1000, 1000) == pytest.approx(0.010 + 0.051)
    assert model.prefill_seconds(1000, 1000, 256) == pytest.approx(4 * 0.010 + 0.051)
    assert model.prefill_seconds(100, 1000, 256, 100_000) == pytest.approx(0.013 + 0.00519)
    assert model.prefill_seconds(0, 1000) == 0


def test_each_step_with_prompts_and_answers_has_the_mixing_penalty() -> None:
    model = StepModel.parse(PAGE | {"mixing": 0.3})
    assert model is not None
    assert model.decode_step(100_000) == pytest.approx(0.013)
    assert model.worst_step(256, 10_000, 100_000) == pytest.approx(0.03092 + 0.003)
    assert model.worst_step(256, 10_000, 0) == pytest.approx(0.02792)
    assert model.prefill_seconds(1000, 1000, 256, 100_000) == pytest.approx(4 * 0.016 + 0.051)
    assert model.prefill_seconds(1000, 1000, 256) == pytest.approx(4 * 0.010 + 0.051)


def test_prompts_that_hide_the_reading_of_weights_make_steps_shorter() -> None:
    page = {"mixing": 0.3, "prompt_base_ms": 4.0, "mixed_context_ns": 20.0}
    model = StepModel.parse(PAGE | page)
    assert model is not None
    assert model.decode_step(100_000) == pytest.approx(0.013)
    # 4 ms, 3 ms of the penalty, 50 ns * 100,000, and 256 tokens
    assert model.worst_step(256, 10_000, 100_000) == pytest.approx(0.004 + 0.003 + 0.005 + 0.01792)
    assert model.prefill_seconds(1000, 1000, 256) == pytest.approx(4 * 0.004 + 0.051)
    # A step takes no less than one without prompts.
    assert model.worst_step(10, 10, 0) == pytest.approx(0.010)
    assert model.prefill_seconds(10, 10) == pytest.approx(0.010)


@pytest.mark.parametrize("name", ["prompt_base_ms", "mixed_context_ns"])
@pytest.mark.parametrize("value", [None, "1", True, -1, math.nan, math.inf, 10**400, []])
def test_strange_factor_of_steps_with_prompts_is_left_out(name: str, value: object) -> None:
    assert StepModel.parse(PAGE | {name: value}) == StepModel.parse(PAGE)


@pytest.mark.parametrize(
    ("value", "mixing"),
    [
        *((known, known) for known in (0, 0.0, 1e-9, 0.3, 1, 100, 100.0)),
        *((bad, None) for bad in (-0.1, 100.1, 10**400, math.nan, math.inf, -math.inf)),
        ("0", None),
        (True, None),
        ([], None),
        (None, None),
    ],
)
def test_strange_mixing_penalty_is_unknown_and_the_rest_of_the_page_holds(
    value: object, mixing: float | None
) -> None:
    model, without = StepModel.parse(PAGE | {"mixing": value}), StepModel.parse(PAGE)
    assert model is not None
    assert model.mixing == mixing
    if mixing is None:
        assert model == without


@pytest.mark.parametrize("name", ["base_ms", "token_us", "token_context_ns", "context_ns"])
@pytest.mark.parametrize(
    "value", [None, "1", True, -1, float("nan"), float("inf"), 1e300, 10**400, [], {}]
)
def test_strange_factor_makes_the_model_unknown(name: str, value: object) -> None:
    assert StepModel.parse(PAGE | {name: value}) is None


@pytest.mark.parametrize("page", [None, 1, "x", [], {}, PAGE | {"base_ms": 0}, {"base_ms": 1}])
def test_strange_page_makes_the_model_unknown(page: object) -> None:
    assert StepModel.parse(page) is None


@pytest.mark.parametrize("given", [None, 0, -1, True, 1.5, "256", 10**9])
def test_strange_chunk_budget_is_unknown(given: Any) -> None:
    assert capabilities({"max_step_tokens": given}).max_step_tokens == 0
    assert capabilities({"max_num_seqs": given}).max_num_seqs == 0


def test_the_slowest_rank_of_an_engine_counts() -> None:
    one = {"max_step_tokens": 256, "step_model": PAGE}
    other = {"max_step_tokens": 512, "step_model": PAGE | {"token_us": 80.0, "base_ms": 5.0}}
    made = capabilities(one, other)
    assert made.max_step_tokens == 512
    assert made.step_model == StepModel.parse(PAGE | {"token_us": 80.0})
    strange: tuple[object, ...] = ({}, None, {"step_model": {}})
    for unknown in strange:
        made = capabilities(one, unknown)
        assert (made.step_model, made.max_step_tokens) == (StepModel.parse(PAGE), 0)


def test_the_largest_known_mixing_penalty_of_the_ranks_counts() -> None:
    unknown, zero, half = ({"step_model": {**PAGE, "mixing": value}} for value in (None, 0, 0.5))
    for ranks, mixing in (((unknown, half, zero), 0.5), ((unknown, zero), 0), ((unknown,), None)):
        model = capabilities(*ranks).step_model
        assert model is not None
        assert model.mixing == mixing


def test_step_limit_is_that_of_the_slowest_rank_or_none() -> None:
    one, other = {"target_itl_ms": 50.0}, {"target_itl_ms": 40}
    assert capabilities(one, other).step_limit == pytest.approx(0.045)
    strange: tuple[object, ...] = ({}, None, *({"target_itl_ms": x} for x in (0, -1, "5", True)))
    for unknown in (*strange, {"target_itl_ms": 10**400}, {"target_itl_ms": float("nan")}):
        assert capabilities(one, unknown).step_limit == math.inf
    assert capabilities().step_limit == math.inf


def test_later_page_replaces_the_model() -> None:
    made = capabilities({"max_step_tokens": 256})
    assert made.step_model is None
    made.note_identity({"ranks": [{"max_step_tokens": 256, "step_model": PAGE}]})
    assert made.step_model == StepModel.parse(PAGE)
