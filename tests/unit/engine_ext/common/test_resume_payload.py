"""What has begun elsewhere, as it travels."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.common.resume_payload import (
    KEY,
    LOWEST,
    MAX_ID,
    MAX_LOGPROBS,
    ResumePayload,
    ResumePayloadError,
    decode_token_ids,
    encode_token_ids,
    logprobs_fit,
    read_resume_payload,
)

IDS = st.lists(st.integers(0, MAX_ID), max_size=50)


@given(IDS)
def test_ids_come_back_as_they_went(token_ids: list[int]) -> None:
    assert decode_token_ids(encode_token_ids(token_ids)) == tuple(token_ids)
    assert len(encode_token_ids(token_ids)) == 4 * len(token_ids)


@given(IDS.filter(bool), IDS)
def test_what_has_begun_comes_back_as_it_went(prompt: list[int], output: list[int]) -> None:
    logprobs = tuple(((token, -0.5), (1, -1.0)) for token in output[1:])
    begun = ResumePayload(tuple(prompt), tuple(output), 1 if output else 0, logprobs)
    assert read_resume_payload({KEY: json.loads(json.dumps(begun.to_wire()))}) == begun
    assert begun.unsent_token_ids == tuple(output[1:])


@pytest.mark.parametrize("token_ids", [[-1], [MAX_ID + 1], [1 << 40], ["a"], [1.5]])
def test_what_is_no_token_id_is_not_packed(token_ids: Any) -> None:
    with pytest.raises(ResumePayloadError):
        encode_token_ids(token_ids)


@pytest.mark.parametrize("params", [None, {}, [], "x", {"begun": None}, 3])
def test_where_nothing_has_begun(params: Any) -> None:
    assert read_resume_payload(params) is None


ONE = encode_token_ids([7])


@pytest.mark.parametrize(
    "begun",
    [
        "x",
        [],
        {},
        {"prompt_token_ids": ""},
        {"prompt_token_ids": [7]},
        {"prompt_token_ids": "!!!!"},
        {"prompt_token_ids": "AAA="},
        {"prompt_token_ids": "AAAAé"},
        {"prompt_token_ids": ONE, "output_token_ids": 3},
        {"prompt_token_ids": ONE, "output_token_ids": ONE, "spoken": 2},
        {"prompt_token_ids": ONE, "output_token_ids": ONE, "spoken": -1},
        {"prompt_token_ids": ONE, "output_token_ids": ONE, "spoken": True},
        {"prompt_token_ids": ONE, "output_token_ids": ONE, "spoken": "0"},
        {"prompt_token_ids": ONE, "output_token_ids": ONE, "logprobs": []},
        {"prompt_token_ids": ONE, "output_token_ids": ONE, "logprobs": [[]]},
        {"prompt_token_ids": ONE, "output_token_ids": ONE, "logprobs": [[[8, -1.0]]]},
        {"prompt_token_ids": ONE, "output_token_ids": ONE, "logprobs": [[[7, "a"]]]},
        {"prompt_token_ids": ONE, "output_token_ids": ONE, "logprobs": [[[7, 0.5]]]},
        {"prompt_token_ids": ONE, "output_token_ids": ONE, "logprobs": [[[7, float("nan")]]]},
        {"prompt_token_ids": ONE, "output_token_ids": ONE, "logprobs": [[7, -1.0]]},
        {"prompt_token_ids": ONE, "output_token_ids": ONE, "logprobs": [[[7, -1]] * 70_000]},
    ],
)
def test_what_makes_no_sense_is_named(begun: Any) -> None:
    with pytest.raises(ResumePayloadError, match="begun"):
        read_resume_payload({KEY: begun})


@pytest.mark.parametrize("written", ["-1e999", "-1" + 400 * "0", "-9999", "-1e300"])
def test_a_log_probability_is_as_low_as_json_can_say(written: str) -> None:
    logprobs = json.loads(f"[[[7, {written}]]]")
    given = {"prompt_token_ids": ONE, "output_token_ids": ONE, "logprobs": logprobs}
    begun = read_resume_payload({KEY: given})
    assert begun is not None
    assert begun.logprobs == (((7, LOWEST),),)


def test_so_many_log_probabilities_fit_and_no_more() -> None:
    assert logprobs_fit(MAX_LOGPROBS, None)
    assert logprobs_fit(MAX_LOGPROBS, 0)
    assert not logprobs_fit(MAX_LOGPROBS + 1, 0)
    assert logprobs_fit(MAX_LOGPROBS // 4, 3)
    assert not logprobs_fit(MAX_LOGPROBS // 4 + 1, 3)
    assert not logprobs_fit(1, -1), "those of all tokens"
