"""Sparse attention (DeepSeek-V3.2, GLM-5): a latent vector a token, and in a cache of its own a key
of the indexer that chooses tokens. vLLM has no kernels for it on CPUs: tests/vllm/mended_sparse.py.

Which tokens are chosen depends on rounding, so a prompt that is computed in other parts, or by
other ranks, has another answer. Each is compared with the answer of an engine that computes the
same parts itself: the prefill engine, which has no prefix cache, or the decode engine, which has
one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.integration.legs import decode, holders, prefill
from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import Server, metric
from tests.vllm import mended_sparse, planted_indexer
from tests.vllm.measures import FETCHED, nothing_left, prefills_only_what_is_new
from tests.vllm.resumed_answers import ask, body_of, differ, hand_over, taken_over
from tests.vllm.servers import (
    OURS,
    PUSH,
    SCHEDULER,
    STOCK,
    TRUSTING,
    UNCACHED,
    Fleet,
    Kind,
    Writer,
    chunking_pair,
)
from tests.vllm.sparse_model import CHOSEN, write_glm_model, write_sparse_model
from tests.vllm.test_push import both_legs

LENGTHS = (1, CHOSEN, CHOSEN + 1, 63, 64, 65, 257, 1000)
FEW = (CHOSEN + 1, 257, 700)
BLOCK = 64
SYSTEM = 10 * BLOCK
OPTIONS = (*SCHEDULER, "--block-size", str(BLOCK))


def sparse(
    name: str, transfer: Mapping[str, Any], *options: str, model: Writer = write_sparse_model
) -> Kind:
    return Kind(name, transfer, (*OPTIONS, *options), model, plugins=(mended_sparse,))


PAIR = (sparse("sparse-p", TRUSTING, UNCACHED), sparse("sparse-d", OURS))


def check(first: Server, second: Server, lengths: Sequence[int] = LENGTHS) -> None:
    """Prompts that `first` computes and `second` reads are those of `first` alone."""
    before = metric(second, FETCHED)
    with nothing_left(first):
        for length in lengths:
            prompt = tokens_of(length, 13_000 + length)
            right = complete(first, prompt)
            turn = decode(second, prompt, prefill(first, prompt))
            assert differences([right], [turn.answer]) == [], length
    assert metric(second, FETCHED) - before == sum(lengths) - lengths.count(1)


def test_prompts_are_those_of_one_vllm_alone(pair: list[Server]) -> None:
    first, second = pair
    check(first, second)


def test_turns_prefill_only_what_is_new(pair: list[Server]) -> None:
    first, second = pair
    held = prefills_only_what_is_new(first, second, second, tokens_of(309, 13_100), 13_101)
    assert held == 5 * BLOCK, "all that the decode engine has cached"


def test_a_prefix_is_borrowed(pair: list[Server]) -> None:
    first, second = pair
    system = tokens_of(SYSTEM, 13_200)
    complete(second, [*system, *tokens_of(20, 13_201)])
    prompt = [*system, *tokens_of(50, 13_202)]
    with nothing_left(*pair):
        params = prefill(first, prompt, holders(second, SYSTEM))
        assert params["borrowed_tokens"] == SYSTEM
        turn = decode(second, prompt, params)
    assert differences([complete(second, prompt)], [turn.answer]) == []


def test_an_answer_is_continued_behind_its_first_token(pair: list[Server]) -> None:
    first, second = pair
    body = body_of("completion", tokens_of(400, 13_300))
    params, said = hand_over(first, "completion", body)
    got = ask(second, "completion", {**body, "kv_transfer_params": taken_over(params, said)})
    assert differ(ask(first, "completion", body), got) == []


def test_pushed_prompts_are_those_of_one_vllm_alone(fleet: Fleet) -> None:
    kinds = chunking_pair("sparse-push", PUSH, write_sparse_model, *OPTIONS[2:])
    with fleet.servers(*(replace(kind, plugins=(mended_sparse,)) for kind in kinds)) as pushing:
        first, second = pushing
        before = metric(second, FETCHED)
        for length in LENGTHS:
            prompt = tokens_of(length, 13_400 + length)
            turn = both_legs(first, second, prompt)
            assert differences([complete(first, prompt)], [turn.answer]) == [], length
        assert metric(second, FETCHED) - before == sum(LENGTHS) - 1


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "size"), [(write_sparse_model, "128"), (write_glm_model, "64")], ids=["split", "glm"]
)
def test_blocks_of_two_kernel_blocks_and_an_indexer_in_every_second_layer(
    fleet: Fleet, model: Writer, size: str
) -> None:
    options = (UNCACHED, "--block-size", size)
    kinds = [sparse(f"{model.__name__}-{size}-{n}", OURS, *options, model=model) for n in "pd"]
    with fleet.servers(*kinds) as (first, second):
        check(first, second)


@pytest.mark.nightly
def test_between_ranks_and_with_stock(fleet: Fleet) -> None:
    kinds = (
        sparse("sparse-ranks", OURS, UNCACHED, "--tensor-parallel-size", "2"),
        sparse("sparse-one", TRUSTING, UNCACHED),
        Kind(
            "sparse-stock",
            STOCK,
            (UNCACHED, *OPTIONS[2:]),
            write_sparse_model,
            plugins=(mended_sparse,),
        ),
    )
    with fleet.servers(*kinds) as (ranks, one, stock):
        for first, second in ((ranks, one), (one, ranks), (stock, one), (one, stock)):
            check(first, second, FEW)


@pytest.mark.nightly
def test_an_indexers_keys_are_seen(fleet: Fleet) -> None:
    """The planted error: of keys that are not moved, wrong tokens are chosen as soon as there are
    more than are chosen."""
    kinds = [
        replace(sparse(f"keyless-{name}", OURS, UNCACHED), plugins=(mended_sparse, planted_indexer))
        for name in "pd"
    ]
    with fleet.servers(*kinds) as (first, second):
        for length in LENGTHS[2:]:
            prompt = tokens_of(length, 13_000 + length)
            turn = decode(second, prompt, prefill(first, prompt))
            is_wrong = differences([complete(first, prompt)], [turn.answer]) != []
            assert is_wrong or length < BLOCK, length
