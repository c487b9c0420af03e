"""What a request's sampling parameters do to its answer."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine_ext.reference.grammar import GrammarCompiler
from engine_ext.reference.messages import SamplingParams
from engine_ext.reference.sampler import Sampler
from engine_ext.reference.sequence import Sequence
from engine_ext.reference.tiny_model import SPECIAL_TOKENS, byte_level_tokenizer
from engine_ext.reference.tokenizer import byte_alphabet
from tests.unit.reference.core.conftest import MakeDriver
from tests.unit.reference.core.harness import greedy, prompt, request

EOS = 2
BYTES = byte_level_tokenizer(byte_alphabet(), [], SPECIAL_TOKENS).to_str()
LOGITS = torch.tensor([1.0, 3.0, 2.0, 0.5, -1.0])


def draw(count: int, **sampling: float) -> Counter[int]:
    sampler = Sampler(seed=1, eos_token_ids=frozenset({EOS}))
    params = SamplingParams(**sampling)  # type: ignore[arg-type]  # top_k and seed are given as int
    seq = Sequence(request("a", [1], params))
    drawn = (sampler.sample(LOGITS[None], [seq])[0] for _ in range(count))
    return Counter(token.token_id for token in drawn if token is not None)


def test_the_draws_follow_the_distribution() -> None:
    counts = draw(4000, temperature=1.0)
    for token, share in enumerate(LOGITS.softmax(-1).tolist()):
        assert counts[token] / 4000 == pytest.approx(share, abs=0.03)


def test_temperature_sharpens() -> None:
    assert draw(1000, temperature=0.5)[1] > draw(1000, temperature=2.0)[1] + 100


def test_temperature_next_to_zero_is_greedy() -> None:
    assert draw(50, temperature=1e-6) == {1: 50}


def test_top_k_keeps_the_best_k() -> None:
    assert set(draw(500, top_k=2)) == {1, 2}
    assert set(draw(500, top_k=1)) == {1}
    assert set(draw(2000, top_k=99)) == {0, 1, 2, 3, 4}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    best = float(LOGITS.softmax(-1)[1])
    assert set(draw(500, top_p=best - 0.01)) == {1}
    assert set(draw(500, top_p=best + 0.01)) == {1, 2}
    assert set(draw(3000, top_p=1.0)) == {0, 1, 2, 3, 4}
    assert set(draw(500, top_p=1e-9)) == {1}


def test_top_p_is_measured_among_what_top_k_left() -> None:
    two = LOGITS[[1, 2]].softmax(-1)
    assert set(draw(500, top_k=2, top_p=float(two[0]) - 0.01)) == {1}


@pytest.mark.parametrize("sharpness", [0.0, 0.5, 8.0], ids=["flat", "soft", "sharp"])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.2])
def test_of_a_large_vocabulary_the_same_tokens_are_drawn_as_from_all_of_it_in_order(
    sharpness: float, top_p: float
) -> None:
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(1)) * sharpness
    kept, ids = logits.sort(descending=True)
    cumulative = kept.double().softmax(-1).cumsum(-1)
    nucleus = min(int((cumulative < top_p).sum()), 4999)
    points = torch.rand(200, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    expected = [
        int(ids[min(int((cumulative <= point * cumulative[nucleus]).sum()), nucleus)])
        for point in points
    ]
    sampler = Sampler(seed=1, eos_token_ids=frozenset())
    seq = Sequence(request("a", [1], SamplingParams(top_p=top_p, seed=7)))
    drawn = [sampler.sample(logits[None], [seq])[0] for _ in points]
    found = [token.token_id for token in drawn if token is not None]
    if sharpness:
        assert found == expected
    else:  # All are equally good: which of them come first is nobody's promise.
        assert len(set(found)) > 100


def test_a_row_that_is_not_finite_is_told_apart() -> None:
    sampler = Sampler(seed=1, eos_token_ids=frozenset())
    rows = torch.stack([LOGITS, torch.full((5,), float("nan")), LOGITS])
    seqs = [Sequence(request(n, [1], SamplingParams(temperature=0.7))) for n in "abc"]
    first, broken, last = sampler.sample(rows, seqs)
    assert broken is None
    assert first is not None
    assert last is not None


def test_logprobs_are_of_the_untouched_distribution() -> None:
    sampler = Sampler(seed=1, eos_token_ids=frozenset({1}))
    params = SamplingParams(temperature=3.0, top_k=2, min_tokens=5, logprobs=2)
    (token,) = sampler.sample(LOGITS[None], [Sequence(request("a", [1], params))])
    assert token is not None
    assert token.token_id != 1
    expected = LOGITS.log_softmax(-1).tolist()
    assert token.logprob is not None
    assert token.logprob.logprob == pytest.approx(expected[token.token_id])
    assert [i for i, _ in token.logprob.top] == [1, 2]
    assert [p for _, p in token.logprob.top] == pytest.approx([expected[1], expected[2]])


def test_a_seed_gives_the_same_tokens_in_any_company(make_driver: MakeDriver) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=42, max_tokens=20, ignore_eos=True)
    alone = make_driver().run(request("a", prompt(40), params))[0]
    crowd = [
        request(f"x{i}", prompt(20 + i, seed=i + 1), SamplingParams(max_tokens=20))
        for i in range(5)
    ]
    among = make_driver(max_num_batched_tokens=32).run(*crowd, request("a", prompt(40), params))
    assert among[-1].token_ids == alone.token_ids
    other = make_driver().run(request("b", prompt(40), replace(params, seed=43)))[0]
    assert other.token_ids != alone.token_ids


def test_requests_without_a_seed_differ_and_an_engine_seed_repeats(
    make_driver: MakeDriver,
) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    pair = [request(n, prompt(40), params) for n in "ab"]
    one, two = make_driver(seed=5).run(*pair)
    assert one.token_ids != two.token_ids
    assert [r.token_ids for r in make_driver(seed=5).run(*pair)] == [one.token_ids, two.token_ids]


def test_alternatives_are_best_first_and_hold_the_greedy_token(make_driver: MakeDriver) -> None:
    result = make_driver().run(request("a", prompt(40), greedy(5, logprobs=4)))[0]
    assert len(result.logprobs) == len(result.token_ids)
    for token, logprob in zip(result.token_ids, result.logprobs, strict=True):
        values = [value for _, value in logprob.top]
        assert logprob.top[0] == (token, logprob.logprob)
        assert values == sorted(values, reverse=True)
        assert len(values) == 4


def test_zero_alternatives_still_give_the_chosen_tokens_logprob(make_driver: MakeDriver) -> None:
    result = make_driver().run(request("a", prompt(40), greedy(3, logprobs=0)))[0]
    assert [x.top for x in result.logprobs] == [()] * 3
    assert all(x.logprob < 0 for x in result.logprobs)


def test_a_form_is_kept_by_a_sequence_that_gave_up_its_blocks_on_the_way(
    make_driver: MakeDriver, model_dir: Path
) -> None:
    tokenizer = (model_dir / "tokenizer.json").read_text()
    compiler = GrammarCompiler(tokenizer, vocab_size=259, eos_token_ids={256, 258})
    form = compiler.compile('{"type": "string", "pattern": "^([a-f][0-9]){30}$"}')
    sampling = SamplingParams(temperature=1.0, max_tokens=100, grammar=form)
    requests = [request(f"r{i}", prompt(20, seed=i), replace(sampling, seed=i)) for i in range(4)]
    driver = make_driver(num_blocks=26, enable_prefix_caching=False)
    results = driver.run(*requests)
    assert driver.core.stats().preemptions
    assert len({result.text for result in results}) == 4
    for result in results:
        assert re.fullmatch('"([a-f][0-9]){30}"', result.text)


def test_a_token_that_a_form_forbids_ends_its_own_request_only() -> None:
    compiler = GrammarCompiler(
        BYTES,
        vocab_size=259,
        eos_token_ids={256, 258},
    )
    constraint = compiler.compile('{"const": 12}').start()
    other = compiler.compile('{"const": 12}').start()
    assert constraint.allowed(259).nonzero().flatten().tolist() == [ord("1")]
    error = constraint.accept(ord("2"))
    assert error is not None
    assert "\n" not in error
    assert other.accept(ord("1")) is None
