"""Pipeline stages of models whose layers are of several kinds, which share memory: which of them do
so differs from stage to stage, and each layer is read where it is."""

from collections.abc import Iterator

import pytest

from tests.vllm.hybrid_model import write_hybrid_model
from tests.vllm.measures import nothing_left
from tests.vllm.servers import OURS, SCHEDULER, UNCACHED, Fleet, Kind
from tests.vllm.state_model import write_state_model
from tests.vllm.test_pipeline import (
    PAIRS,
    STAGES,
    Servers,
    a_turn_is_right,
    engines,
    prompts_are_right,
)
from tests.vllm.test_state import pulled

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def windowed(
    fleet: Fleet, stages_mended: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    """Windows at the first layer and the third. `uneven` has the last three in one stage, and
    there the second shares with the third, not with the first."""
    model = write_hybrid_model(tmp_path_factory.mktemp("windows"))
    with engines(fleet, "windows", OURS, stages_mended, model=model) as started:
        yield started


@pytest.mark.parametrize("pair", PAIRS)
def test_prompts_are_those_of_one_engine_alone(windowed: Servers, pair: str) -> None:
    prefiller, decoder = (windowed[name] for name in PAIRS[pair])
    seed = 60_000 + 10_000 * list(PAIRS).index(pair)
    with nothing_left(prefiller, decoder):
        prompts_are_right(prefiller, decoder, windowed["one"], pulled, seed)
    a_turn_is_right(prefiller, decoder, windowed["one"], seed + 7)


def test_a_state_in_each_stage(
    fleet: Fleet, stages_mended: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = write_state_model(tmp_path_factory.mktemp("states"))
    staged = Kind("states-staged", OURS, (*SCHEDULER, UNCACHED, *STAGES), model, stages_mended)
    one = Kind("states-one", OURS, (*SCHEDULER, UNCACHED), model)
    with fleet.servers(staged, one) as (stages, alone):
        for prefiller, decoder in ((stages, alone), (alone, stages)):
            prompts_are_right(prefiller, decoder, alone, pulled, 95_000)
