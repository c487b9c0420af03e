"""Loans inside vLLM: an engine lends what its own prefix cache holds."""

import hashlib
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from engine_ext.common.short_hash import short_hash
from engine_ext.wire.notifications import Read
from tests.integration.legs import decode, prefill
from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import Server, metric, wait_for
from tests.integration.stranger import stranger
from tests.integration.test_loans import Borrower
from tests.vllm.measures import COMPUTED, FETCHED, freed
from tests.vllm.releases import BUILD

SEED = "vllm-none-hash"


def sha256(what: Any) -> bytes:
    return hashlib.sha256(pickle.dumps(what, protocol=pickle.HIGHEST_PROTOCOL)).digest()


class VllmBorrower(Borrower):
    """Hashes as vLLM does by default."""

    scheme = f"vllm {BUILD} sha256 {short_hash(SEED)}"

    def key(self, parent: bytes, tokens: list[int]) -> bytes:
        return sha256((parent or sha256(SEED), tuple(tokens), None))


@contextmanager
def borrower_of(server: Server) -> Iterator[VllmBorrower]:
    with stranger() as agent:
        yield VllmBorrower(agent, server)


@pytest.fixture(scope="module")
def borrower(decoder: Server) -> Iterator[VllmBorrower]:
    with borrower_of(decoder) as asking:
        yield asking


def test_an_idle_engine_lends_its_cached_prefix_and_another_one_continues_from_it(
    prefiller: Server, decoder: Server, alone: Server, borrower: VllmBorrower
) -> None:
    system = tokens_of(640, 1)
    complete(decoder, [*system, *tokens_of(20, 2)])
    wait_for(lambda: freed(decoder), "the engine is idle")
    prompt = [*system, *tokens_of(50, 3)]
    loan = borrower.ask(prompt)
    assert loan.num_tokens == 640
    assert 0 < loan.seconds <= 10
    assert not freed(decoder), "the blocks are pinned"
    computed, fetched = metric(prefiller, COMPUTED), metric(prefiller, FETCHED)
    answer = prefill(prefiller, prompt, borrower.params(loan, prompt))
    assert metric(prefiller, FETCHED) - fetched == 640
    assert metric(prefiller, COMPUTED) - computed == 50
    borrower.say(Read(loan.request_id))
    wait_for(lambda: freed(decoder), "the blocks come back")
    again = decode(decoder, prompt, answer)
    assert differences([complete(alone, prompt)], [again.answer]) == []
