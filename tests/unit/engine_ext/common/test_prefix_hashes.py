import base64
import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from engine_ext.common.prefix_hashes import (
    HASH_BYTES,
    MOST_HASHES,
    ContentKey,
    Keys,
    PrefixHashes,
    UnusableHashes,
    digest,
    hash_of_params,
)

LONG = 128 * 1024
PLACE = {
    "remote_engine_id": "p",
    "remote_request_id": "p-1",
    "tp_size": 1,
    "remote_num_tokens": 100,
    "remote_block_size": 16,
    "remote_block_ids": [[5, 3, 8, 1, 2, 9, 4]],
}

tokens = st.lists(st.integers(0, 5), max_size=80)
steps = st.integers(1, 16)
media = st.builds(
    lambda name, start, length: ContentKey("mm", (name,), start, start + length),
    st.sampled_from("ab"),
    st.integers(0, 79),
    st.integers(1, 9),
)
all_keys = st.builds(
    lambda adapter, salt, media: [*adapter, *salt, *sorted(media, key=lambda key: key.start)],
    st.lists(st.just(ContentKey("lora", ("name", "/path"))), max_size=1),
    st.lists(st.sampled_from([ContentKey("cache_salt", (salt,)) for salt in "xy"]), max_size=1),
    st.lists(media, max_size=3, unique_by=lambda key: key.start),
)


def common_prefix(one: list[int], other: list[int]) -> int:
    equal = (a == b for a, b in zip(one, other, strict=False))
    return next((i for i, same in enumerate(equal) if not same), min(len(one), len(other)))


def equal_content(one: list[int], keys: Keys, other: list[int], others: Keys) -> int:
    """Leading tokens whose KV is the same: a difference in keys shows from its first token on."""
    first_difference = min((key.start for key in {*keys} ^ {*others}), default=len(one))
    return min(common_prefix(one, other), first_difference)


@given(tokens, tokens, steps)
def test_no_more_is_proven_than_is_equal_and_every_whole_step_is(
    held: list[int], wanted: list[int], step: int
) -> None:
    proven = PrefixHashes.of(held, step=step).count_verified_tokens(wanted)
    equal = common_prefix(held, wanted)
    assert proven == (equal if equal == len(held) else equal - equal % step)


@given(tokens, tokens, steps, all_keys, all_keys)
def test_no_more_is_proven_than_depends_on_the_same_keys(
    held: list[int], more: list[int], step: int, keys: Keys, others: Keys
) -> None:
    wanted = [*held, *more]
    equal = equal_content(held, keys, wanted, others)
    proven = PrefixHashes.of(held, keys, step=step).count_verified_tokens(wanted, others)
    assert proven == (len(held) if equal >= len(held) else equal - equal % step)


@given(tokens, all_keys, all_keys)
def test_the_digest_of_a_content_is_that_of_no_other(
    held: list[int], keys: Keys, others: Keys
) -> None:
    assume(held)
    same = equal_content(held, keys, held, others) >= len(held)
    assert (digest(held, keys) == digest(held, others)) == same


@given(st.lists(st.integers(0, 5), min_size=1, max_size=80), st.integers(0, 79), steps)
def test_an_edit_ends_the_proof_at_its_step(held: list[int], position: int, step: int) -> None:
    position %= len(held)
    edited = [*held[:position], held[position] + 10, *held[position + 1 :]]
    proven = PrefixHashes.of(held, step=step).count_verified_tokens(edited)
    assert proven == position - position % step


@given(tokens, tokens, all_keys, steps)
def test_a_proof_of_the_first_tokens_is_that_of_a_content_that_ends_there(
    held: list[int], more: list[int], keys: Keys, step: int
) -> None:
    count = len(held)
    assert PrefixHashes.of([*held, *more], keys, count, step) == PrefixHashes.of(
        held, keys, step=step
    )
    assert digest([*held, *more], keys, count) == digest(held, keys)


@given(tokens, st.sampled_from([16, 32, 4096]), all_keys)
def test_a_proof_survives_the_wire(held: list[int], step: int, keys: Keys) -> None:
    proof = PrefixHashes.of(held, keys, step=step)
    assert PrefixHashes.from_wire(json.loads(json.dumps(proof.to_wire(PLACE))), PLACE) == proof


@pytest.mark.parametrize("num_tokens", [0, 1, 4096, 4097, LONG, LONG + 1])
def test_a_proof_has_a_bounded_number_of_hashes_and_a_step_is_small_beside_the_whole(
    num_tokens: int,
) -> None:
    proof = PrefixHashes.of(range(num_tokens))
    assert len(proof.hashes) <= MOST_HASHES * HASH_BYTES
    assert proof.step <= max(16, num_tokens // 128)


def test_hashes_are_the_same_on_every_host() -> None:
    keys = [ContentKey("cache_salt", ("grün",)), ContentKey("mm", ("0f",), 2, 3)]
    proof = PrefixHashes.of([1, 2, 3, 70000], keys, step=2)
    assert proof.to_wire(PLACE) == {
        "v": 4,
        "step": 2,
        "n": 4,
        "b": "5h53hXexni9xHwOmxVpVjg==",
        "h": "3xgULELCPFKsT92AeJTlR+BfNo8GpuOzqeZbUL9GDr0=",
    }
    assert digest([1, 2, 3, 70000], keys).hex() == (
        "e05f368f06a6e3b3a9e65b50bf460ebd065ed0547b8f7777fb5ad97df8b11d87"
    )


GOOD = PrefixHashes.of(range(100), step=16).to_wire(PLACE)


@pytest.mark.parametrize(
    "change",
    [
        {"remote_block_ids": [[5, 3, 8, 1, 2, 4, 9]]},
        {"remote_block_ids": [[5, 3, 8, 1, 2, 9]]},
        {"remote_block_ids": [5, 3, 8, 1, 2, 9, 4]},
        *({key: None} for key in PLACE),
    ],
)
def test_a_proof_is_bound_to_what_it_was_told_with(change: dict[str, Any]) -> None:
    assert hash_of_params(json.loads(json.dumps(PLACE))) == hash_of_params({**PLACE, "pp_size": 1})
    assert hash_of_params({**PLACE, **change}) != hash_of_params(PLACE)
    assert PrefixHashes.from_wire(GOOD, {**PLACE, **change}) is UnusableHashes.UNREADABLE


def test_only_nothing_at_all_is_absent() -> None:
    assert PrefixHashes.from_wire(None, PLACE) is UnusableHashes.ABSENT


def hashes(number: int) -> str:
    return base64.b64encode(bytes(HASH_BYTES * number)).decode()


@pytest.mark.parametrize(
    "raw",
    [
        [],
        {},
        "",
        0,
        False,
        {**GOOD, "v": 1},
        {**GOOD, "v": 3},
        {**GOOD, "v": "4"},
        {**GOOD, "step": 15},
        {"v": 4, "step": 16, "n": 4112, "b": GOOD["b"], "h": hashes(257)},
        {**GOOD, "b": None},
        {**GOOD, "b": "é"},
        {**GOOD, "step": 0},
        {**GOOD, "step": True},
        {**GOOD, "step": 1 << 60},
        {**GOOD, "n": -1},
        {**GOOD, "n": 16},
        {**GOOD, "n": 1 << 60},
        {**GOOD, "h": ""},
        {**GOOD, "h": None},
        {**GOOD, "h": "!!!!"},
        {**GOOD, "h": "é"},
        {**GOOD, "h": GOOD["h"] + "AAAA"},
        {"v": 1, "block": 16, "n": 0, "h": ""},
    ],
)
def test_what_is_there_and_is_no_proof_is_unreadable(raw: Any) -> None:
    assert PrefixHashes.from_wire(raw, PLACE) is UnusableHashes.UNREADABLE


@pytest.mark.parametrize("key", ["v", "step", "n", "b", "h"])
def test_a_proof_without_one_of_its_parts_is_unreadable(key: str) -> None:
    rest = {name: value for name, value in GOOD.items() if name != key}
    assert PrefixHashes.from_wire(rest, PLACE) is UnusableHashes.UNREADABLE


@given(st.integers(0, len(GOOD["h"]) - 1))
def test_a_proof_that_is_cut_anywhere_is_unreadable(length: int) -> None:
    assert (
        PrefixHashes.from_wire({**GOOD, "h": GOOD["h"][:length]}, PLACE)
        is UnusableHashes.UNREADABLE
    )


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists))
def test_anything_at_all_is_read_without_an_error(raw: Any) -> None:
    for value in (raw, *({**GOOD, key: raw} for key in GOOD)):
        assert isinstance(PrefixHashes.from_wire(value, PLACE), PrefixHashes | UnusableHashes)
