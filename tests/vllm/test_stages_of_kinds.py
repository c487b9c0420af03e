"""Pipeline stages of models whose layers are of several kinds, which share memory: which of them do
so differs from stage to stage, and each layer is read where it is."""

import pytest

from tests.vllm import mended_pipeline
from tests.vllm.hybrid_model import write_hybrid_model
from tests.vllm.measures import nothing_left
from tests.vllm.servers import OURS, SCHEDULER, UNCACHED, Fleet, Kind
from tests.vllm.state_model import write_state_model
from tests.vllm.test_pipeline import (
    PAIRS,
    STAGES,
    Servers,
    a_turn_is_right,
    in_stages,
    prompts_are_right,
)
from tests.vllm.test_state import pulled

pytestmark = pytest.mark.nightly


# Windows at the first layer and the third. `uneven` has the last three in one stage, and there the
# second shares with the third, not with the first.
SERVERS = in_stages("windows", OURS, model=write_hybrid_model)


@pytest.mark.parametrize("pair", PAIRS)
def test_prompts_are_those_of_one_engine_alone(servers: Servers, pair: str) -> None:
    prefiller, decoder = (servers[name] for name in PAIRS[pair])
    seed = 60_000 + 10_000 * list(PAIRS).index(pair)
    with nothing_left(prefiller, decoder):
        prompts_are_right(prefiller, decoder, servers["one"], pulled, seed)
    a_turn_is_right(prefiller, decoder, servers["one"], seed + 7)


def test_a_state_in_each_stage(fleet: Fleet) -> None:
    options, model = (*SCHEDULER, UNCACHED), write_state_model
    staged = Kind("states-staged", OURS, (*options, *STAGES), model, plugins=(mended_pipeline,))
    one = Kind("states-one", OURS, options, model)
    with fleet.servers(staged, one) as (stages, alone):
        for prefiller, decoder in ((stages, alone), (alone, stages)):
            prompts_are_right(prefiller, decoder, alone, pulled, 95_000)
