"""DeepSeek's multi-token prediction (MTP) over latent attention: a module guesses what follows, and
its keys and values move with the model's.

No token shows whether these are right: a wrong guess costs a step and nothing else. So guesses are
counted: as many are right as where the decoder computed the prompt itself, and fewer where P's
module is another one.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.integration.legs import Turn, take_turn
from tests.integration.oracle import Answer, complete, differences, tokens_of
from tests.integration.processes import Server, metric
from tests.vllm.measures import COMPUTED, FETCHED, nothing_left
from tests.vllm.mla_model import BACKEND
from tests.vllm.mtp_model import write_mtp_model
from tests.vllm.servers import OURS, PUSH, Fleet, Kind
from tests.vllm.test_push import both_legs
from tests.vllm.test_speculation import ACCEPTED, DRAFTED, LENGTHS, speculating

pytestmark = pytest.mark.nightly

MTP = (*BACKEND, *speculating(method="mtp", num_speculative_tokens=2, attention_backend=BACKEND[1]))
LAX = {**OURS, "kv_connector_extra_config": {"enforce_handshake_compat": False}}
PROMPTS = [tokens_of(length, 8000 + length) for length in LENGTHS]
NUM_TOKENS = 40


def write_bad_guesser(directory: Path) -> Path:
    return write_mtp_model(directory, guesses_well=False)


PAIR = [
    pytest.param(
        tuple(Kind(f"mtp-{name}-{side}", transfer, MTP, write_mtp_model) for side in "pd"), id=name
    )
    for name, transfer in (("pull", OURS), ("push", PUSH))
]


@pytest.fixture(scope="module", autouse=True)
def right(fleet: Fleet) -> list[Answer]:
    """Return the answers of an engine without speculation. It ends before the others start."""
    with fleet.server(Kind("mtp-alone", None, BACKEND, write_mtp_model)) as alone:
        return [complete(alone, prompt, NUM_TOKENS) for prompt in PROMPTS]


def through(pair: list[Server], prompt: list[int], previous: Any = None) -> Turn:
    first, second = pair
    legs = both_legs if "push" in first.name else take_turn
    return legs(first, second, prompt, previous, NUM_TOKENS)


def guessed(server: Server, ask: Callable[[], list[Answer]]) -> tuple[list[Answer], float]:
    """What is answered, and how many tokens of it were guessed."""
    before = metric(server, ACCEPTED)
    answers = ask()
    return answers, metric(server, ACCEPTED) - before


def computed_by(server: Server) -> list[Answer]:
    return [complete(server, prompt, NUM_TOKENS) for prompt in PROMPTS]


def moved(pair: list[Server]) -> list[Answer]:
    return [through(pair, prompt).answer for prompt in PROMPTS]


def test_as_much_is_guessed_right_as_in_one_engine_alone(
    pair: list[Server], right: list[Answer]
) -> None:
    first, second = pair
    drafted = metric(second, DRAFTED)
    answers, accepted = guessed(second, partial(computed_by, second))
    assert differences(right, answers) == []
    assert 0.1 < accepted / (metric(second, DRAFTED) - drafted) < 0.9
    fetched = metric(second, FETCHED)
    with nothing_left(first):
        answers, accepted_of_loaded = guessed(second, partial(moved, pair))
    assert differences(right, answers) == []
    assert accepted_of_loaded == accepted
    assert metric(second, FETCHED) - fetched == sum(LENGTHS)


def test_as_much_is_guessed_right_behind_a_turn(pair: list[Server]) -> None:
    """P computes the last token of what it pulls once more: D's module had seen another behind."""
    first, second = pair
    prompt = tokens_of(300, 8100)
    turn = through(pair, prompt)
    prompt = [*prompt, *turn.answer.tokens, *tokens_of(40, 8101)]
    alone = guessed(second, lambda: [complete(second, prompt, NUM_TOKENS)])
    computed = metric(first, COMPUTED)
    again = guessed(second, lambda: [through(pair, prompt, turn.params).answer])
    assert differences(alone[0], again[0]) == []
    assert again[1] == alone[1]
    assert metric(first, COMPUTED) - computed < 100, "the turn was pulled"


def test_another_modules_keys_and_values_are_seen(fleet: Fleet, right: list[Answer]) -> None:
    """The planted error, else the counts would prove nothing."""
    well = Kind("mtp-well", LAX, MTP, write_mtp_model)
    with fleet.servers(well, Kind("mtp-badly", LAX, MTP, write_bad_guesser)) as (good, bad):
        _, alone = guessed(good, partial(computed_by, good))
        answers, accepted = guessed(good, partial(moved, [bad, good]))
        assert differences(right, answers) == []
        assert accepted < alone
