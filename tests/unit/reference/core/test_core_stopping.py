"""How answers end, on a model that says what the test wants. Token ids below 256 are bytes."""

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from engine_ext.reference.messages import RequestOutput
from engine_ext.reference.model import Decoder, ForwardBatch
from engine_ext.reference.tiny_model import ENDOFTEXT_ID, IM_END_ID, VOCAB_SIZE
from tests.unit.reference.core.conftest import MakeDriver
from tests.unit.reference.core.harness import greedy, prompt, request

PROMPT = prompt(10)
SECOND_BEST = ord("X")


class Parrot:
    def __init__(self, script: Sequence[int]) -> None:
        self._script = script

    def forward(self, batch: ForwardBatch, layers: Sequence[Tensor]) -> Tensor:
        said = (batch.positions[batch.logit_rows] + 1 - len(PROMPT)).tolist()
        logits = torch.zeros(len(said), VOCAB_SIZE)
        logits[:, SECOND_BEST] = 1.0
        for row, at in enumerate(said):
            logits[row, self._script[at % len(self._script)]] = 2.0
        return logits


class Faulty:
    """The real model, until it meets the marked prompt token."""

    MARK = ord("~")

    def __init__(self, decoder: Decoder, *, raises: bool) -> None:
        self._decoder = decoder
        self._raises = raises

    def forward(self, batch: ForwardBatch, layers: Sequence[Tensor]) -> Tensor:
        logits = self._decoder.forward(batch, layers)
        bad = batch.token_ids[batch.logit_rows] == self.MARK
        if self._raises and bad.any():
            raise RuntimeError("planted in the model")
        return torch.where(bad[:, None], float("nan"), logits)


def say(make_driver: MakeDriver, script: Sequence[int], **sampling: Any) -> RequestOutput:
    changes = {"max_tokens": 12} | sampling
    driver = make_driver(model=Parrot(script))
    result = driver.run(request("a", PROMPT, greedy(**changes)))[0]
    driver.assert_empty()
    return result


def test_max_tokens_ends_with_length(make_driver: MakeDriver) -> None:
    result = say(make_driver, b"abcdef", max_tokens=4)
    assert (result.text, result.finish_reason, result.stop_reason) == ("abcd", "length", None)
    assert result.token_ids == tuple(b"abcd")


def test_the_context_ends_with_length(make_driver: MakeDriver) -> None:
    driver = make_driver(model=Parrot(b"ab"), max_model_len=16)
    result = driver.run(request("a", PROMPT, greedy(100)))[0]
    assert (result.text, result.finish_reason) == ("ababab", "length")


@pytest.mark.parametrize("eos", [IM_END_ID, ENDOFTEXT_ID])
def test_eos_stops_without_a_reason_and_without_text(make_driver: MakeDriver, eos: int) -> None:
    result = say(make_driver, [*b"ab", eos, *b"cd"], skip_special_tokens=False)
    assert (result.text, result.finish_reason, result.stop_reason) == ("ab", "stop", None)
    assert result.token_ids == (*b"ab", eos)


def test_ignore_eos_goes_on(make_driver: MakeDriver) -> None:
    result = say(make_driver, [*b"ab", IM_END_ID, *b"cd"], ignore_eos=True, max_tokens=5)
    assert (result.text, result.finish_reason) == ("abcd", "length")


def test_a_stop_string_across_tokens_ends_at_its_last_token(make_driver: MakeDriver) -> None:
    result = say(make_driver, b"abcdef", stop=("cde",))
    assert (result.text, result.finish_reason, result.stop_reason) == ("ab", "stop", "cde")
    assert result.token_ids == tuple(b"abcde")


def test_a_stop_string_wins_over_length_on_the_same_token(make_driver: MakeDriver) -> None:
    result = say(make_driver, b"abcdef", stop=("cd",), max_tokens=4)
    assert (result.finish_reason, result.stop_reason) == ("stop", "cd")


def test_text_kept_back_comes_with_the_end(make_driver: MakeDriver) -> None:
    assert say(make_driver, b"abcdef", stop=("def!",), max_tokens=6).text == "abcdef"
    unfinished = say(make_driver, "aé".encode(), max_tokens=2)
    assert unfinished.text == "a\ufffd"


def test_nothing_stops_before_min_tokens(make_driver: MakeDriver) -> None:
    eos = say(make_driver, [*b"ab", IM_END_ID], min_tokens=4)
    assert eos.text == "abXab"
    text = say(make_driver, b"abc", stop=("b",), min_tokens=3)
    assert (text.text, text.stop_reason) == ("abca", "b")


def test_a_failing_forward_pass_ends_its_batch_and_not_the_engine(
    make_driver: MakeDriver, decoder: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    driver = make_driver(model=Faulty(decoder, raises=True))
    driver.add(request("fine", prompt(20)))
    driver.step()
    with caplog.at_level(logging.ERROR):
        driver.run(request("bad", [*prompt(20), Faulty.MARK]))
    assert driver.result("bad").finish_reason == "error"
    assert driver.result("bad").error == "the forward pass failed"
    assert driver.result("fine").finish_reason == "error"
    assert "planted in the model" in caplog.text
    driver.assert_empty()
    assert driver.run(request("next", prompt(20)))[0].finish_reason in ("stop", "length")


def test_broken_logits_end_their_request_only(make_driver: MakeDriver, decoder: Decoder) -> None:
    driver = make_driver(model=Faulty(decoder, raises=False))
    bad, fine = driver.run(
        request("bad", [*prompt(20), Faulty.MARK]), request("fine", prompt(30, seed=1))
    )
    assert bad.finish_reason == "error"
    assert bad.token_ids == ()
    assert fine.finish_reason in ("stop", "length")
    assert fine.token_ids == make_driver().run(request("x", prompt(30, seed=1)))[0].token_ids
    driver.assert_empty()


def test_counts_are_of_what_was_done(make_driver: MakeDriver) -> None:
    driver = make_driver()
    driver.run(request("a", prompt(40), greedy(5, ignore_eos=True)))
    driver.run(request("b", prompt(40), greedy(3, ignore_eos=True)))
    driver.add(request("c", prompt(40, seed=1)))
    driver.abort("c")
    stats = driver.core.stats()
    assert stats.prompt_tokens == 120
    assert stats.prompt_tokens_computed == 48
    assert stats.prompt_tokens_cached == 32
    assert stats.generation_tokens == 8
    assert stats.requests_finished == {"length": 2, "abort": 1}
