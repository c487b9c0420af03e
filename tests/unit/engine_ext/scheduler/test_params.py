from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.common.access import parse_networks
from engine_ext.scheduler.params import TransferRole, parse

GOOD: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[3, 2, 1]],
    "remote_engine_id": "e",
    "remote_request_id": "cmpl-1-0-abcdef01",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_num_tokens": 40,
}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=20,
)


def test_prefill_skeleton_of_the_router_makes_us_a_prefiller() -> None:
    skeleton = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    assert parse(skeleton).role is TransferRole.PREFILL


def test_full_answer_of_a_prefiller_is_a_source() -> None:
    source = parse({**GOOD, "transfer_mode": "pull", "unknown": [1]}).source
    assert source is not None
    assert source.address == ("e", "10.0.0.1", 5600, 1, 1)
    assert source.num_tokens == 40
    assert source.block_ids == ((3, 2, 1),)


def test_flat_block_list_of_an_older_peer_is_one_group() -> None:
    source = parse({**GOOD, "remote_block_ids": [3, 2, 1]}).source
    assert source is not None
    assert source.block_ids == ((3, 2, 1),)


HOLDER: dict[str, Any] = {
    "remote_engine_id": "h",
    "remote_host": "10.0.0.2",
    "remote_port": 5601,
    "tp_size": 1,
    "expected_tokens": 4096,
}


@pytest.mark.parametrize("leg", [{"do_remote_decode": True}, {}])
def test_prefills_and_decode_only_legs_name_the_holders_of_their_prompt(
    leg: dict[str, Any],
) -> None:
    (holder,) = parse({**leg, "holders": [HOLDER]}).holders
    assert holder.address == ("h", "10.0.0.2", 5601, 1, 1)
    assert holder.expected_tokens == 4096
    assert parse({**GOOD, "holders": [HOLDER]}).holders == (), "it loads from a prefill engine"


@pytest.mark.parametrize(
    "holders", [HOLDER, [[]], [HOLDER] * 5, [{**HOLDER, "expected_tokens": "many"}]]
)
def test_malformed_holders_cost_the_loan_only(holders: Any) -> None:
    params = parse({"do_remote_decode": True, "holders": holders})
    assert (params.role, params.holders) == (TransferRole.PREFILL, ())
    assert params.problem is not None


def test_a_malformed_holder_costs_no_loan_of_the_others() -> None:
    params = parse({"holders": [{**HOLDER, "remote_port": 0}, HOLDER]})
    assert [one.index for one in params.holders] == [1]
    assert params.problem is not None


def test_holders_outside_of_the_allowed_networks_are_not_asked() -> None:
    other = {**HOLDER, "remote_host": "10.9.0.1"}
    params = parse({"holders": [other, HOLDER]}, "pull", parse_networks("peers", ["10.0.0.0/24"]))
    assert [one.address.host for one in params.holders] == ["10.0.0.2"]
    assert params.problem is not None


def test_absent_params_and_false_flags_are_no_problem() -> None:
    for raw in (None, {}, {"foo": 1}, {"do_remote_prefill": False}):
        params = parse(raw)
        assert params.role is TransferRole.NONE
        assert params.problem is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("remote_engine_id", None),
        ("remote_engine_id", ""),
        ("remote_engine_id", "x" * 513),
        ("remote_engine_id", "né"),
        ("remote_request_id", 7),
        ("remote_request_id", "a,b"),
        ("remote_host", "a\nb"),
        ("remote_port", "5600"),
        ("remote_port", 0),
        ("remote_port", 65536),
        ("remote_port", True),
        ("remote_port", 5600.0),
        ("remote_block_ids", None),
        ("remote_block_ids", []),
        ("remote_block_ids", ["a"]),
        ("remote_block_ids", [[1], 2]),
        ("remote_block_ids", [1, [2]]),
        ("remote_block_ids", [[-1]]),
        ("remote_block_ids", [[1 << 31]]),
        ("remote_block_ids", [[True]]),
        ("remote_block_ids", "12"),
        ("tp_size", 0),
        ("remote_num_tokens", -1),
        ("remote_num_tokens", 1.5),
        ("do_remote_prefill", "yes"),
        ("do_remote_decode", True),
    ],
)
def test_a_bad_field_makes_the_request_local_and_is_named(key: str, value: Any) -> None:
    params = parse({**GOOD, key: value})
    assert params.role is TransferRole.NONE
    assert params.source is None
    assert params.problem is not None
    assert key in params.problem


@given(json_values)
def test_any_value_is_parsed_without_an_exception(value: Any) -> None:
    parse(value)


@given(st.sampled_from(sorted(GOOD)), json_values)
def test_any_value_of_any_field_is_parsed_without_an_exception(key: str, value: Any) -> None:
    params = parse({**GOOD, key: value})
    assert (params.source is not None) == (params.role is TransferRole.DECODE)


@pytest.mark.parametrize("key", ["dcp_size", "pcp_size"])
def test_parallelism_that_is_not_supported_is_named_and_the_request_computed_here(key: str) -> None:
    params = parse({**GOOD, key: 2})
    assert params.role is TransferRole.NONE
    assert params.problem is not None
    assert key in params.problem


def test_the_numbers_of_ranks_are_part_of_the_address() -> None:
    source = parse({**GOOD, "tp_size": 4, "pp_size": 2}).source
    assert source is not None
    assert source.address.tp_size == source.tp_size == 4
    assert source.address.pp_size == 2


def test_a_host_outside_of_the_allowed_peers_is_not_followed_in_either_role_or_mode() -> None:
    inside = parse_networks("allowed_peers", ["10.0.0.0/24"])
    outside = parse_networks("allowed_peers", ["10.0.1.0/24"])
    assert parse(GOOD, allowed_peers=inside).source is not None
    assert parse({**GOOD, "remote_host": "a.name"}, allowed_peers=outside).source is not None
    for mode in ("pull", "push"):
        params = parse(GOOD, mode, outside)
        assert (params.role, params.source, params.target) == (TransferRole.NONE, None, None)
        assert "allowed_peers" in str(params.problem)
    turn = {**GOOD, "do_remote_prefill": False, "do_remote_decode": True}
    params = parse(turn, allowed_peers=outside)
    assert (params.role, params.source) == (TransferRole.PREFILL, None)
    assert "allowed_peers" in str(params.problem)
