"""Chunked local attention (Llama 4). With the hybrid KV-cache manager off, each layer keeps all of
its blocks, and all are moved; with it, vLLM gives them up chunk by chunk, and we refuse."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.legs import decode, prefill, take_turn
from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import Server, metric
from tests.vllm.chunked_model import CHUNK, write_chunked_model
from tests.vllm.measures import COMPUTED, FETCHED, nothing_left
from tests.vllm.servers import OURS, SCHEDULER, Fleet, Kind

LENGTHS = (1, CHUNK - 1, CHUNK, CHUNK + 1, 129, 500, 1500)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chunked_model(tmp_path_factory.mktemp("chunked"))


@pytest.fixture(scope="module")
def pair(fleet: Fleet, model: Path) -> Iterator[list[Server]]:
    with fleet.pair("chunked", OURS, model, "--disable-hybrid-kv-cache-manager") as servers:
        yield servers


def test_prompts_are_those_of_one_engine_alone(pair: list[Server]) -> None:
    prefiller, decoder = pair
    fetched = metric(decoder, FETCHED)
    with nothing_left(*pair):
        for length in LENGTHS:
            prompt = tokens_of(length, 10_000 + length)
            right = complete(prefiller, prompt, max_tokens=2 * CHUNK)
            turn = decode(decoder, prompt, prefill(prefiller, prompt), max_tokens=2 * CHUNK)
            assert differences([right], [turn.answer]) == [], length
    assert metric(decoder, FETCHED) - fetched == sum(LENGTHS) - 1


def test_an_answer_depends_on_tokens_of_other_chunks(pair: list[Server]) -> None:
    """Else equal answers would prove little."""
    plain = tokens_of(500, 10_100)
    changed = [*plain[:100], plain[100] ^ 1, *plain[101:]]
    right, wrong = (complete(pair[0], prompt) for prompt in (plain, changed))
    assert differences([right], [wrong]) != []


def test_turns_prefill_only_what_is_new(pair: list[Server]) -> None:
    prefiller, decoder = pair
    prompt = tokens_of(300, 10_200)
    turn = take_turn(prefiller, decoder, prompt)
    assert turn.params is not None
    longer = [*prompt, *turn.answer.tokens, *tokens_of(50, 10_201)]
    right, before = complete(prefiller, longer), metric(prefiller, COMPUTED)
    again = take_turn(prefiller, decoder, longer, turn.params)
    assert differences([right], [again.answer]) == []
    assert metric(prefiller, COMPUTED) - before == len(longer) - turn.params["remote_num_tokens"]


def test_blocks_that_are_given_up_chunk_by_chunk_are_refused_at_start(
    fleet: Fleet, model: Path
) -> None:
    kind = Kind("by-chunk", OURS, SCHEDULER, model)
    with pytest.raises(AssertionError, match="died"), fleet.server(kind):
        pass
    (log,) = fleet.logs.glob("by-chunk-*.log")
    said = log.read_text()
    assert "not support KV cache of ChunkedLocalAttentionSpec (start with --disable-hybrid-" in said
