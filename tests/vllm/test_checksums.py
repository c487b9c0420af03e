"""`kv_checksum` inside vLLM: what each kind of layer keeps is the same bytes on both sides, turns
included, so that every load is verified."""

from pathlib import Path
from typing import Any

import pytest

from tests.integration.legs import decode, prefill, take_turn
from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import BOTH_WAYS
from tests.vllm.hybrid_model import write_hybrid_model
from tests.vllm.measures import counted, nothing_left
from tests.vllm.servers import OURS, Fleet, Writer, chunking_pair
from tests.vllm.state_model import write_state_model

CHECKED: dict[str, Any] = {
    **OURS,
    "kv_connector_extra_config": {**BOTH_WAYS, "kv_checksum": True},
}
LENGTHS = (2, 31, 33, 200, 700, 1500)


def each_load_is_verified(fleet: Fleet, name: str, model: Path | Writer, turns: int) -> None:
    with fleet.servers(*chunking_pair(f"checked-{name}", CHECKED, model)) as (prefiller, decoder):
        with nothing_left(prefiller, decoder):
            for length in LENGTHS:
                prompt = tokens_of(length, 700 + length)
                right = complete(prefiller, prompt)
                answer = decode(decoder, prompt, prefill(prefiller, prompt)).answer
                assert differences([right], [answer]) == [], length
        assert counted(decoder, "loads_verified") == len(LENGTHS)
        prompt = tokens_of(300, 7)
        turn = take_turn(prefiller, decoder, prompt)
        longer = [*prompt, *turn.answer.tokens, *tokens_of(40, 8)]
        right = complete(prefiller, longer)
        again = take_turn(prefiller, decoder, longer, turn.params)
        assert differences([right], [again.answer]) == []
        assert counted(prefiller, "loads_verified") == turns
        for server in (prefiller, decoder):
            assert counted(server, "loads_unverified") == 0
            assert counted(server, "loads_corrupted") == 0


def test_every_load_and_turn_is_verified(fleet: Fleet) -> None:
    each_load_is_verified(fleet, "tiny", fleet.model, turns=1)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "write", "turns"),
    [("window", write_hybrid_model, 1), ("state", write_state_model, 0)],
)
def test_windows_and_states_are_verified(
    fleet: Fleet, name: str, write: Writer, turns: int
) -> None:
    """A state is of no turn."""
    each_load_is_verified(fleet, name, write, turns)
