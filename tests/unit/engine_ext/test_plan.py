import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.plan import (
    PlanError,
    descriptor_indices,
    match_peer,
    pair_blocks,
    strided_descriptors,
)
from engine_ext.types import CacheGeometry
from engine_ext.wire import AgentMetadata
from tests.unit.engine_ext.fakes import regions

GEOMETRY = CacheGeometry(block_size=16, num_blocks=32)


@given(
    st.permutations(range(20)),
    st.permutations(range(20)),
    st.integers(0, 19),
    st.integers(0, 320),
)
def test_blocks_are_paired_by_position(
    local: list[int], remote: list[int], first_block: int, num_tokens: int
) -> None:
    last_token = min(first_block * 16 + num_tokens, 320)
    pairs = pair_blocks(local, remote, first_block * 16, last_token, 16)
    last_block = -(-last_token // 16)
    expected = dict(zip(local[first_block:last_block], remote[first_block:last_block], strict=True))
    assert dict(zip(pairs.local.tolist(), pairs.remote.tolist(), strict=True)) == expected
    assert sorted(pairs.local.tolist()) == pairs.local.tolist()


def test_descending_ids_become_one_ascending_run() -> None:
    pairs = pair_blocks([9, 8, 7, 6], [29, 28, 27, 26], 0, 64, 16)
    assert pairs.local.tolist() == [6, 7, 8, 9]
    assert pairs.remote.tolist() == [26, 27, 28, 29]


def test_a_longer_remote_list_is_cut_at_the_tokens_wanted_not_at_its_end() -> None:
    pairs = pair_blocks([1, 2], [10, 11, 12, 13], 0, 32, 16)
    assert pairs.remote.tolist() == [10, 11]


@pytest.mark.parametrize(
    ("local", "remote", "first", "last"),
    [([1], [1, 2], 0, 32), ([1, 2], [1], 0, 32), ([1, 2], [1, 2], 8, 32), ([1], [1], -16, 16)],
)
def test_lists_that_do_not_cover_the_tokens_are_refused(
    local: list[int], remote: list[int], first: int, last: int
) -> None:
    with pytest.raises(PlanError):
        pair_blocks(local, remote, first, last, 16)


def test_descriptors_are_numbered_region_after_region() -> None:
    indices = descriptor_indices(np.array([1, 3], dtype=np.int32), [10, 20, 10])
    assert indices.tolist() == [1, 3, 11, 13, 31, 33]
    assert indices.dtype == np.int32


def test_a_block_outside_a_region_is_refused() -> None:
    with pytest.raises(PlanError):
        descriptor_indices(np.array([10], dtype=np.int32), [20, 10])


def test_one_descriptor_row_per_region_whatever_the_blocks() -> None:
    assert strided_descriptors(regions(num_blocks=1_000_000, layers=3)).shape == (3, 5)


def metadata(**changes: object) -> AgentMetadata:
    layers = regions()
    fields: dict[str, object] = {
        "engine_id": "p",
        "agent_metadata": b"",
        "kv_caches_base_addr": [region.base_addr for region in layers],
        "device_id": 0,
        "num_blocks": 64,
        "block_lens": [4096, 4096],
        "block_strides": [8192, 8192],
        "kv_cache_layout": "LBHNC",
        "block_size": 16,
        "attn_backend_name": "CPU_ATTN",
        "region_names": [region.name for region in layers],
    }
    return AgentMetadata(**{**fields, **changes})  # type: ignore[arg-type] # msgspec struct


def test_regions_are_lined_up_by_name() -> None:
    names = [region.name for region in regions()]
    layout = match_peer(
        GEOMETRY, regions(), metadata(region_names=names[::-1], region_num_blocks=[7, 8])
    )
    assert [region.name for region in layout.regions] == names
    assert layout.region_num_blocks == [8, 7]
    assert layout.regions[0].block_stride == 8192


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"block_size": 32}, "block_size"),
        ({"kv_cache_layout": "LBNHC"}, "kv_cache_layout"),
        ({"attn_backend_name": "FLASH_ATTN"}, "attn_backend_name"),
        ({"block_lens": [4096, 8192], "block_strides": [8192, 8192]}, "block_len"),
        ({"block_strides": [4096, 1]}, "block_stride"),
        ({"region_names": ["a", "b"]}, "no region"),
        (
            {"kv_caches_base_addr": [1], "block_lens": [1], "block_strides": [1]},
            "number of regions",
        ),
    ],
)
def test_a_peer_that_does_not_fit_is_refused_by_name(change: dict[str, object], word: str) -> None:
    with pytest.raises(PlanError, match=word):
        match_peer(GEOMETRY, regions(), metadata(**change))
