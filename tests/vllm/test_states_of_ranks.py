"""Layers that keep a state, between engines of unlike tensor parallel sizes: the bytes with the
sizes of real models, and the answers of a tiny one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.releases import BUILD, NEXT, python_of
from tests.vllm.servers import CHUNKS, OURS, SCHEDULER, UNCACHED, WAITS_BRIEFLY, Fleet, Kind
from tests.vllm.state_model import write_state_model
from tests.vllm.test_push import both_legs
from tests.vllm.test_releases import results_inside
from tests.vllm.test_state import Legs, prompts_are_right, pulled

LENGTHS = (1, 2, 33, 64, 257, 700)
OTHERWISE = {
    "swapped": "wrong",  # an error is planted
    "groups that no configuration names": "how a state is divided is not known",
}


@pytest.mark.parametrize("release", [BUILD, NEXT])
def test_each_rank_gets_its_part_of_each_state(fleet: Fleet, tmp_path: Path, release: str) -> None:
    found = results_inside(python_of(fleet, release), tmp_path, "tests.vllm.inside.states")
    assert len(found) == 70 + len(OTHERWISE)
    others = {case: said for case, said in found.items() if said != "right"}
    assert others.keys() == OTHERWISE.keys()
    assert all(word in others[case] for case, word in OTHERWISE.items())


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("transfer", "legs"), [(OURS, pulled), (WAITS_BRIEFLY, both_legs)], ids=["pull", "push"]
)
def test_prompts_are_those_of_one_engine_alone(
    fleet: Fleet, transfer: Mapping[str, Any], legs: Legs
) -> None:
    """Of Mamba-2 with one group, of which each of two ranks has a copy."""
    options = (*SCHEDULER, UNCACHED, *CHUNKS)
    one = Kind("states-of-one", transfer, options, write_state_model)
    parallel = (*options, "--tensor-parallel-size", "2")
    two = Kind("states-of-two", transfer, parallel, write_state_model)
    with fleet.servers(one, two) as servers:
        prompts_are_right(servers, legs, 9800, LENGTHS)
        prompts_are_right(servers[::-1], legs, 9900, LENGTHS)
