"""What a begun request carries, and whether it can begin: the parts that know no vLLM."""

from dataclasses import dataclass
from typing import Any

import pytest

from engine_ext.common.resume_payload import MAX_ID, ResumePayload
from engine_ext.vllm.optional.answers.resumed_request import (
    CANNOT_RESUME,
    FIELD,
    Replay,
    ResumeLimits,
    cannot_resume,
    carried,
    refusal,
    replay_in,
    token_ids_in,
)


@dataclass
class Params:
    """As vLLM's SamplingParams."""

    extra_args: Any


def test_what_was_given_is_found_where_it_was_put() -> None:
    begun = ResumePayload((1, 2), (3, 4), num_sent=1, logprobs=(((4, -0.5), (7, -1.5)),))
    params = Params({FIELD: carried(begun), "other": 1})
    assert token_ids_in(params) == [3, 4]
    assert replay_in(params) == Replay([3, 4], 1, [[(4, -0.5), (7, -1.5)]])


def test_a_prompt_alone_gives_nothing_of_an_answer() -> None:
    assert replay_in(Params({FIELD: carried(ResumePayload((1, 2)))})) is None


@pytest.mark.parametrize(
    "extra",
    [
        None,
        {},
        7,
        {FIELD: None},
        {FIELD: [1]},
        {FIELD: {"token_ids": None}},
        {FIELD: {"token_ids": "abc"}},
        {FIELD: {"token_ids": [1, "2"]}},
        {FIELD: {"token_ids": [True]}},
        {FIELD: {"token_ids": [1.0]}},
        {FIELD: {"token_ids": [-1]}},
        {FIELD: {"token_ids": [MAX_ID + 1]}},
        {FIELD: {"token_ids": [[1]]}},
    ],
)
def test_what_makes_no_sense_is_nothing_and_raises_nothing(extra: Any) -> None:
    assert token_ids_in(Params(extra)) == []
    assert replay_in(Params(extra)) is None
    assert token_ids_in(None) == []


FITS = ResumeLimits(vocab_size=100, max_model_len=10, sends_only_the_rest=True)


def test_a_request_can_begin_up_to_the_contexts_end() -> None:
    assert refusal(ResumePayload((1,) * 9, (2,)), FITS) is None
    assert refusal(ResumePayload((99,)), FITS) is None


@pytest.mark.parametrize(
    ("begun", "words"),
    [
        (ResumePayload((1,) * 10), "11 tokens"),
        (ResumePayload((1,) * 9, (2, 2)), "11 tokens"),
        (ResumePayload((100,)), "prompt_token_ids holds 100"),
        (ResumePayload((1,), (100,)), "output_token_ids holds 100"),
    ],
)
def test_what_the_model_cannot_read_is_refused_by_name(begun: ResumePayload, words: str) -> None:
    assert words in str(refusal(begun, FITS))


def test_fields_that_need_a_rendered_prompt_are_named() -> None:
    asked = ResumeLimits(
        vocab_size=9, max_model_len=9, sends_only_the_rest=True, conflicts=("echo", "n")
    )
    assert refusal(ResumePayload((1,)), asked) == "begun cannot be combined with echo, n"


def test_only_a_stream_leaves_out_what_the_client_has() -> None:
    asked = ResumeLimits(vocab_size=9, max_model_len=9, sends_only_the_rest=False)
    assert "spoken" in str(refusal(ResumePayload((1,), (2,), num_sent=1), asked))
    assert refusal(ResumePayload((1,), (2,)), asked) is None


ENTRY = ((2, -0.5), (3, -1.0))


@pytest.mark.parametrize(
    ("wanted", "begun", "is_refused"),
    [
        (None, ResumePayload((1,), (2,)), False),
        (0, ResumePayload((1,), (2,)), True),
        (0, ResumePayload((1,), (2,), num_sent=1), False),
        (0, ResumePayload((1,)), False),
        (2, ResumePayload((1,), (2,), logprobs=(ENTRY,)), False),
        (3, ResumePayload((1,), (2,), logprobs=(ENTRY,)), True),
        (2, ResumePayload((1,), (2,), logprobs=(((2, -0.5), (2, -0.5)),)), True),
        (-1, ResumePayload((1,), (2,), logprobs=(ENTRY,)), True),
    ],
)
def test_log_probabilities_that_are_asked_for_must_be_given(
    wanted: int | None, begun: ResumePayload, is_refused: bool
) -> None:
    asked = ResumeLimits(
        vocab_size=9, max_model_len=9, sends_only_the_rest=True, num_logprobs=wanted
    )
    assert (refusal(begun, asked) is not None) is is_refused


@pytest.mark.parametrize(
    ("extra", "is_to_stay"),
    [
        (None, False),
        (7, False),
        ({}, False),
        ({CANNOT_RESUME: 1}, False),
        ({CANNOT_RESUME: True}, True),
    ],
)
def test_only_true_marks_an_answer_that_cannot_be_resumed(extra: Any, is_to_stay: bool) -> None:
    assert cannot_resume(Params(extra)) is is_to_stay
