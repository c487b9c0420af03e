"""Answers that begin in the middle, against those of one engine that was not disturbed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from torch import Tensor

from engine_ext.common.resume_payload import ResumePayload, read_resume_payload
from engine_ext.reference.answer import (
    GeneratedAnswer,
    ResumedAnswer,
    StopRules,
    resume_answer,
)
from engine_ext.reference.engine import merge
from engine_ext.reference.messages import RequestOutput, SamplingParams
from engine_ext.reference.model import ForwardBatch
from engine_ext.reference.tiny_model import ENDOFTEXT_ID, IM_END_ID, VOCAB_SIZE
from tests.unit.reference.core.conftest import MakeDriver
from tests.unit.reference.core.harness import (
    Driver,
    FakeConnector,
    copy_blocks,
    greedy,
    prompt,
    request,
)

RULES = StopRules(frozenset({IM_END_ID, ENDOFTEXT_ID}), 512)
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


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


@dataclass(frozen=True)
class Undisturbed:
    """One engine's answer, token by token."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    steps: tuple[RequestOutput, ...]

    @property
    def whole(self) -> RequestOutput:
        return merge(list(self.steps))

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.whole.token_ids

    def text(self, start: int, end: int | None = None) -> str:
        """Said by the tokens from `start` to `end`."""
        return "".join(step.text for step in self.steps[start:end])

    def given(self, count: int, spoken: int) -> ResumePayload:
        logprobs = tuple(
            ((one.token_id, one.logprob), *one.top) for one in self.whole.logprobs[spoken:count]
        )
        return ResumePayload(self.prompt, self.tokens[:count], spoken, logprobs)


def undisturbed(
    driver: Driver, tokens: Sequence[int], sampling: SamplingParams | None = None
) -> Undisturbed:
    one = request("alone", tokens, sampling or greedy())
    driver.run(one)
    steps = tuple(driver.outputs.pop("alone"))
    assert all(len(step.token_ids) == 1 for step in steps)
    return Undisturbed(tuple(tokens), one.sampling, steps)


def go_on(
    driver: Driver, alone: Undisturbed, begun: ResumedAnswer, **fields: Any
) -> list[RequestOutput]:
    """What the engine says that goes on."""
    one = request("later", alone.prompt, alone.sampling, **fields)
    driver.go_on(one, begun)
    driver.finish("later")
    return driver.outputs.pop("later")


def check(alone: Undisturbed, begun: ResumedAnswer, said: list[RequestOutput], spoken: int) -> None:
    """The rest is what the undisturbed engine said behind the first `spoken` tokens."""
    rest, whole = merge(said), alone.whole
    assert begun.sent_text == alone.text(0, spoken)
    assert rest.text == alone.text(spoken)
    assert rest.token_ids == whole.token_ids[spoken:]
    assert (rest.finish_reason, rest.stop_reason) == (whole.finish_reason, whole.stop_reason)
    for ours, theirs in zip(rest.logprobs, whole.logprobs[spoken:], strict=True):
        assert (ours.token_id, len(ours.top)) == (theirs.token_id, len(theirs.top))
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
        for one, other in zip(ours.top, theirs.top, strict=True):
            assert one[1] == pytest.approx(other[1], abs=1e-3)


def check_all(driver: Driver, alone: Undisturbed, tokenizer: Tokenizer) -> None:
    """After every number of tokens, with none, one and all of them spoken."""
    for count in range(len(alone.tokens) + 1):
        for spoken in {0, min(1, count), count}:
            begun = resume_answer(alone.given(count, spoken), alone.sampling, tokenizer, RULES)
            said = go_on(driver, alone, begun)
            check(alone, begun, said, spoken)
            if spoken < count:
                assert said[0].token_ids == alone.tokens[spoken:count], "said before any step"
        driver.assert_empty()


@pytest.fixture
def driver(make_driver: MakeDriver) -> Driver:
    """None of the KV is at hand."""
    return make_driver(enable_prefix_caching=False)


SAMPLINGS: dict[str, SamplingParams] = {
    "greedy": greedy(24, ignore_eos=True),
    "logprobs": greedy(12, logprobs=3, ignore_eos=True),
    "the chosen one's logprob alone": greedy(6, logprobs=0, ignore_eos=True),
    "seeded": greedy(20, temperature=1.0, seed=7, ignore_eos=True),
    "seeded, truncated": greedy(20, temperature=1.3, seed=-5, top_p=0.9, top_k=40),
    "min_tokens": greedy(20, min_tokens=15, temperature=1.5, seed=3),
    "special tokens": greedy(16, skip_special_tokens=False, temperature=2.0, seed=4),
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_an_answer_goes_on_after_any_token(name: str, driver: Driver, tokenizer: Tokenizer) -> None:
    check_all(driver, undisturbed(driver, prompt(30, seed=2), SAMPLINGS[name]), tokenizer)


def test_the_draws_that_are_passed_over_are_those_of_as_many_tokens(
    driver: Driver, tokenizer: Tokenizer
) -> None:
    """Beyond sixteen: what the library draws at once is what it draws one by one."""
    sampling = greedy(90, temperature=1.0, seed=11, ignore_eos=True)
    alone = undisturbed(driver, prompt(10), sampling)
    for count in (15, 16, 17, 64, 89):
        begun = resume_answer(alone.given(count, count), sampling, tokenizer, RULES)
        check(alone, begun, go_on(driver, alone, begun), count)


def test_a_token_that_is_not_the_answers_is_seen(driver: Driver, tokenizer: Tokenizer) -> None:
    alone = undisturbed(driver, prompt(30, seed=2), greedy(24, ignore_eos=True))
    for place in (0, 5, 11):
        tokens = list(alone.tokens[:12])
        tokens[place] = (tokens[place] + 1) % 256
        begun = resume_answer(
            ResumePayload(alone.prompt, tuple(tokens)), alone.sampling, tokenizer, RULES
        )
        assert merge(go_on(driver, alone, begun)).token_ids[12:] != alone.tokens[12:]


SCRIPT = "dée 🙂 xyz stop xyzw abc".encode()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"stop": ("xyzw",)},
        {"stop": ("🙂 x", "never")},
        {"stop": ("zzz", "é"), "min_tokens": 3},
        {"stop": ("xyz",), "min_tokens": 12},
        {"max_tokens": 3},
        {"max_tokens": 9, "stop": ("🙂 xyz",)},
        {"stop": ("abcd",)},
    ],
)
def test_stop_strings_and_characters_cross_the_seam(
    changes: dict[str, Any], make_driver: MakeDriver, tokenizer: Tokenizer
) -> None:
    driver = make_driver(model=Parrot([*SCRIPT, IM_END_ID]), enable_prefix_caching=False)
    alone = undisturbed(driver, PROMPT, greedy(**{"max_tokens": 40} | changes))
    check_all(driver, alone, tokenizer)


ENDS: dict[str, tuple[dict[str, Any], Sequence[int], tuple[str, str, str | int | None]]] = {
    "end of sequence": ({}, [*b"ab", IM_END_ID], ("ab", "stop", None)),
    "stop string": ({"stop": ("bc",)}, b"abc", ("a", "stop", "bc")),
    "max_tokens": ({"max_tokens": 3}, b"abc", ("abc", "length", None)),
    "behind the end": ({"stop": ("b",)}, b"abcdef", ("a", "stop", "b")),
    "more than max_tokens": ({"max_tokens": 2}, b"abcdef", ("ab", "length", None)),
    "context": ({}, b"x" * 22, ("x" * 22, "length", None)),
}


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("spoken", [0, 1, 99])
def test_what_ends_the_answer_among_the_given_tokens_ends_it_without_a_step(
    name: str, spoken: int, make_driver: MakeDriver, tokenizer: Tokenizer
) -> None:
    changes, tokens, (text, reason, stop_reason) = ENDS[name]
    connector = FakeConnector()
    driver = make_driver(connector, max_model_len=32)
    sampling = greedy(**{"max_tokens": 50} | changes)
    spoken = min(spoken, len(tokens))
    rules = RULES._replace(max_model_len=32)
    begun = resume_answer(ResumePayload(PROMPT, tuple(tokens), spoken), sampling, tokenizer, rules)
    driver.go_on(request("a", PROMPT, sampling, {"do_remote_prefill": True}), begun)
    (last,) = driver.outputs["a"]
    assert (begun.sent_text + last.text, last.finish_reason) == (text, reason)
    assert last.stop_reason == stop_reason
    assert begun.token_ids[: begun.num_sent] + last.token_ids == begun.token_ids
    status = "stopped" if reason == "stop" else "length_capped"
    assert connector.calls == ["on_new_request a", f"request_finished a {status}"]
    driver.assert_empty()
    assert driver.core.stats().requests_finished == {reason: 1}


@pytest.mark.parametrize("early", [IM_END_ID, ENDOFTEXT_ID])
def test_what_may_not_end_the_answer_yet_does_not(
    early: int, driver: Driver, tokenizer: Tokenizer
) -> None:
    sampling = greedy(8, min_tokens=4)
    alone = Undisturbed(PROMPT, sampling, ())
    begun = resume_answer(ResumePayload(PROMPT, (66, early)), sampling, tokenizer, RULES)
    assert begun.finish is None
    assert len(merge(go_on(driver, alone, begun)).token_ids) >= 4


def test_a_preempted_answer_that_began_elsewhere_is_the_same(
    make_driver: MakeDriver, tokenizer: Tokenizer
) -> None:
    sampling = greedy(30, temperature=1.0, seed=5, ignore_eos=True)
    alone = undisturbed(make_driver(), prompt(30), sampling)
    driver = make_driver(num_blocks=11, enable_prefix_caching=False)
    begun = resume_answer(alone.given(4, 2), sampling, tokenizer, RULES)
    driver.add(request("first", prompt(30, seed=1), greedy(30, ignore_eos=True)))
    said = go_on(driver, alone, begun)
    check(alone, begun, said, 2)
    assert driver.core.stats().preemptions > 0


@pytest.mark.parametrize("loaded", [30, 32, 33])
def test_the_remotes_blocks_hold_prompt_and_answer(
    loaded: int, make_driver: MakeDriver, tokenizer: Tokenizer
) -> None:
    """30 tokens of prompt, 4 of the answer: of what the remote has, nothing is computed again."""
    p_side, d_side = FakeConnector(), FakeConnector()
    prefiller, decoder = make_driver(p_side), make_driver(d_side)
    alone = undisturbed(make_driver(), prompt(30), greedy(12, ignore_eos=True))
    p_side.scheduler.held.add("p")
    prefiller.run(request("p", prompt(30), greedy(4, ignore_eos=True)))
    d_side.scheduler.external["later"] = loaded
    begun = resume_answer(alone.given(4, 4), alone.sampling, tokenizer, RULES)
    decoder.go_on(request("later", alone.prompt, alone.sampling), begun)
    decoder.step()
    copied = p_side.scheduler.blocks["p"], decoder.core, d_side.scheduler.blocks["later"]
    copy_blocks(prefiller.core, *copied)
    d_side.worker.report(received=["later"])
    decoder.step()
    before = decoder.core.stats().generation_tokens
    decoder.finish("later")
    result = decoder.result("later")
    assert result.token_ids == alone.tokens[4:]
    stats = decoder.core.stats()
    assert (stats.prompt_tokens_computed, stats.prompt_tokens_fetched) == (0, 30)
    assert (result.num_cached_tokens, before) == (30, 0)


def test_what_a_prefill_hands_over_is_prompt_outputs_and_their_logprobs(
    make_driver: MakeDriver, tokenizer: Tokenizer
) -> None:
    connector = FakeConnector()
    driver = make_driver(connector, enable_prefix_caching=False)
    alone = undisturbed(driver, prompt(20), greedy(12, logprobs=2, ignore_eos=True))
    sampling = replace(alone.sampling, max_tokens=5)
    begun = resume_answer(alone.given(4, 2), sampling, tokenizer, RULES, hands_over=True)
    connector.scheduler.held.add("later")
    told = ResumePayload(alone.prompt, alone.tokens[:5]).to_wire()
    connector.scheduler.answers["later"] = {"begun": told}
    params = {"do_remote_decode": True, "hand_over": True}
    said = go_on(driver, replace(alone, sampling=sampling), begun, params=params)
    answered = read_resume_payload(merge(said).kv_transfer_params)
    assert answered is not None
    again = resume_answer(answered, alone.sampling, tokenizer, RULES)
    check(alone, again, go_on(make_driver(), alone, again), 2)


def test_a_prefill_that_hands_over_says_nothing_that_is_held_back(make_driver: MakeDriver) -> None:
    """Half a character, or what may be a stop string: whoever goes on says it."""
    driver = make_driver(model=Parrot("éxyz".encode()), enable_prefix_caching=False)
    params = {"do_remote_decode": True, "hand_over": True}
    for most, text in ((1, ""), (2, "é"), (3, "é")):
        sampling = greedy(most, stop=("xyz",))
        (result,) = driver.run(request(f"p{most}", PROMPT, sampling, params))
        assert (result.text, result.finish_reason) == (text, "length")
    (result,) = driver.run(request("p4", PROMPT, greedy(1), {"do_remote_decode": True}))
    assert result.text == "\ufffd"


@pytest.mark.parametrize("is_own", [True, False])
def test_an_answer_that_may_be_refused_says_nothing_before_it_is_admitted(
    is_own: bool, make_driver: MakeDriver, tokenizer: Tokenizer
) -> None:
    driver = make_driver(global_cache_hit_threshold=0.0 if is_own else 0.5)
    alone = undisturbed(make_driver(), prompt(40), greedy(12, ignore_eos=True))
    fields = {"threshold": 0.5} if is_own else {}
    begun = resume_answer(alone.given(4, 0), alone.sampling, tokenizer, RULES)
    (refused,) = go_on(driver, alone, begun, **fields)
    assert (refused.text, refused.token_ids) == ("", ())
    assert refused.finish_reason == "cache_threshold"
    driver.run(request("warm", prompt(40), greedy(1), threshold=0.0))
    begun = resume_answer(alone.given(4, 0), alone.sampling, tokenizer, RULES)
    said = go_on(driver, alone, begun, **fields)
    check(alone, begun, said, 0)
    assert said[0].token_ids == alone.tokens[:4]


def test_a_remote_hears_of_a_request_that_was_declined(make_driver: MakeDriver) -> None:
    connector = FakeConnector()
    driver = make_driver(connector)
    driver.core.decline("x", {"do_remote_prefill": True})
    assert connector.calls == ["on_new_request x", "request_finished x error"]
    assert driver.core.stats().requests_finished == {}
    driver.assert_empty()


tokens_of_any_kind = st.one_of(
    st.sampled_from([*"stop é🙂".encode(), IM_END_ID, ENDOFTEXT_ID]), st.integers(0, VOCAB_SIZE - 1)
)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_given_or_generated_the_answer_is_the_same(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    tokens = tuple(data.draw(st.lists(tokens_of_any_kind, min_size=1, max_size=40)))
    stops = st.lists(st.sampled_from(["stop", "st", "op s", "é", "🙂", "top st"]), max_size=2)
    sampling = SamplingParams(
        max_tokens=data.draw(st.integers(1, 45)),
        min_tokens=data.draw(st.integers(0, 10)),
        stop=tuple(data.draw(stops)),
        ignore_eos=data.draw(st.booleans()),
        skip_special_tokens=data.draw(st.booleans()),
    )
    rules = RULES._replace(max_model_len=data.draw(st.integers(4, 60)))
    generated = GeneratedAnswer((65, 66), sampling, tokenizer, rules)
    said = []
    for token in tokens:
        said.append(generated.accept(token))
        if said[-1].finish is not None:
            break
    count = data.draw(st.integers(0, len(tokens)))
    spoken = data.draw(st.integers(0, count))
    begun = resume_answer(
        ResumePayload((65, 66), tokens[:count], spoken), sampling, tokenizer, rules
    )
    rest = []
    for token in tokens[count : len(said)] if begun.finish is None else ():
        rest.append(begun.answer.accept(token))
    assert begun.sent_text == "".join(one.text for one in said[:spoken])
    assert begun.sent_text + begun.text == "".join(one.text for one in said[:count])
    assert rest == said[count:]
    assert begun.finish == (said[-1].finish if count >= len(said) else None)
