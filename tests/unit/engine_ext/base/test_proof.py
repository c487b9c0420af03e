from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.base.proof import PrefixProof

tokens = st.lists(st.integers(0, 5), max_size=80)


def common_prefix(one: list[int], other: list[int]) -> int:
    equal = (a == b for a, b in zip(one, other, strict=False))
    return next((i for i, same in enumerate(equal) if not same), min(len(one), len(other)))


@given(tokens, tokens, st.integers(1, 16))
def test_no_more_is_proven_than_is_equal_and_every_whole_block_is(
    held: list[int], wanted: list[int], block_size: int
) -> None:
    proven = PrefixProof.of(held, block_size).proven_tokens(wanted)
    equal = common_prefix(held, wanted)
    assert proven <= equal
    assert proven == (equal if equal == len(held) else equal - equal % block_size)


@given(tokens, tokens, st.integers(1, 16))
def test_a_longer_prompt_proves_all_that_the_remote_holds(
    held: list[int], more: list[int], block_size: int
) -> None:
    assert PrefixProof.of(held, block_size).proven_tokens(held + more) == len(held)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=80), st.integers(0, 79), st.integers(1, 16))
def test_an_edit_ends_the_proof_at_its_block(
    held: list[int], position: int, block_size: int
) -> None:
    position %= len(held)
    edited = [*held[:position], held[position] + 10, *held[position + 1 :]]
    proven = PrefixProof.of(held, block_size).proven_tokens(edited)
    assert proven == position - position % block_size


@given(tokens, st.integers(1, 16))
def test_a_proof_survives_the_wire(held: list[int], block_size: int) -> None:
    proof = PrefixProof.of(held, block_size)
    assert PrefixProof.from_wire(proof.to_wire()) == proof


def test_hashes_are_the_same_on_every_host() -> None:
    assert PrefixProof.of([1, 2, 3, 70000], 2).to_wire()["h"] == "qLR0JYV9Nf9vDjJWLQQpgg=="


@pytest.mark.parametrize(
    "raw",
    [
        None,
        [],
        {},
        {"v": 2, "block": 16, "n": 0, "h": ""},
        {"v": 1, "block": 0, "n": 0, "h": ""},
        {"v": 1, "block": True, "n": 0, "h": ""},
        {"v": 1, "block": 16, "n": -1, "h": ""},
        {"v": 1, "block": 16, "n": 16, "h": ""},
        {"v": 1, "block": 16, "n": 16, "h": "!!!!"},
        {"v": 1, "block": 16, "n": 16, "h": "é"},
        {"v": 1, "block": 1, "n": 1 << 60, "h": ""},
    ],
)
def test_what_is_no_proof_is_none(raw: Any) -> None:
    assert PrefixProof.from_wire(raw) is None
