"""The engine lends what its own prefix cache holds: the blocks stay while they are lent."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from engine_ext.common.config import ConnectorConfig
from engine_ext.common.orders import LoanAnswer, Revoke, StepMetadata
from engine_ext.common.types import (
    CacheGeometry,
    LoanRequest,
    TransferResults,
)
from engine_ext.reference.block_manager import chain_digest
from engine_ext.reference.model import Decoder
from tests.unit.engine_ext.orders import ordered
from tests.unit.reference.core.harness import (
    BLOCK,
    Driver,
    FakeWorker,
    LoadlessConnector,
    greedy,
    make_core,
    prompt,
    request,
)

NUM_BLOCKS = 129


class RecordingWorker(FakeWorker):
    """Keeps what the scheduler half orders."""

    def __init__(self) -> None:
        super().__init__([])
        self.loans: list[LoanAnswer] = []
        self.revoked: list[str] = []

    def start_load_kv(self, meta: StepMetadata) -> None:
        self.loans += ordered(meta, LoanAnswer)
        self.revoked += ordered(meta, Revoke)


def keys_of(tokens: Sequence[int]) -> tuple[bytes, ...]:
    keys: list[bytes] = []
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        keys.append(chain_digest(keys[-1] if keys else b"", tokens[start : start + BLOCK]))
    return tuple(keys)


class Lender(Driver):
    def __init__(self, model_dir: Path, decoder: Decoder) -> None:
        self.worker = RecordingWorker()

        def connect(_: object, geometry: CacheGeometry) -> LoadlessConnector:
            return LoadlessConnector(ConnectorConfig(engine_id="h"), geometry, self.worker)

        core = make_core(model_dir, connect=connect, model=decoder, max_num_batched_tokens=64)
        super().__init__(core)

    def ask(self, tokens: Sequence[int]) -> LoanAnswer:
        worker = self.worker
        asked = LoanRequest("r", 1, self.core.scheduler.scheme, keys_of(tokens))
        worker.results = TransferResults(loan_requests=(asked,))
        assert self.core.has_work, "an idle engine takes a step for it"
        self.step()
        assert self.core.has_work, "and another one for the answer"
        self.step()
        return worker.loans.pop()

    def end(self, loan_id: str) -> None:
        self.worker.report(sent=[loan_id])
        self.step()


@pytest.fixture
def lender(model_dir: Path, decoder: Decoder) -> Lender:
    return Lender(model_dir, decoder)


def test_blocks_that_are_lent_outlive_a_full_cache_and_come_back(lender: Lender) -> None:
    tokens = prompt(81)
    lender.run(request("first", tokens, greedy(1)))
    loan = lender.ask(tokens)
    assert loan.num_tokens == 80
    (blocks,) = loan.block_ids
    kept = [layer[list(blocks)].clone() for layer in lender.core.cache.layers]
    for seed in range(1, 6):
        lender.run(request(f"other-{seed}", prompt(400, seed), greedy(1)))
    for before, layer in zip(kept, lender.core.cache.layers, strict=True):
        assert bool((before == layer[list(blocks)]).all())
    assert lender.core.stats().num_blocks_delayed == len(blocks)
    lender.end(loan.loan_id)
    lender.assert_empty()


def test_what_was_evicted_is_refused(lender: Lender) -> None:
    tokens = prompt(81)
    lender.run(request("first", tokens, greedy(1)))
    for seed in range(1, 6):
        lender.run(request(f"other-{seed}", prompt(400, seed), greedy(1)))
    assert not lender.ask(tokens).loan_id
    lender.assert_empty()


def test_blocks_are_found_and_lent_only_under_the_same_cache_salt(lender: Lender) -> None:
    tokens = prompt(81)
    for number, (salt, cached) in enumerate((("x", 0), ("y", 0), ("x", 80), ("y", 80))):
        (got,) = lender.run(request(f"salted-{number}", tokens, greedy(1), salt=salt))
        assert got.num_cached_tokens == cached
    assert not lender.ask(tokens).loan_id
    (got,) = lender.run(request("plain", tokens, greedy(1)))
    assert got.num_cached_tokens == 0
    lender.end(lender.ask(tokens).loan_id)
    lender.assert_empty()


def test_only_blocks_that_a_finished_step_has_written_are_lent(lender: Lender) -> None:
    """In the middle of a prompt of three steps."""
    tokens = prompt(161)
    lender.add(request("long", tokens, greedy(1)))
    lender.step()
    asked = LoanRequest("r", 1, lender.core.scheduler.scheme, keys_of(tokens))
    lender.worker.results = TransferResults(loan_requests=(asked,))
    lender.step()
    computed = 128
    lender.step()
    (loan,) = lender.worker.loans
    assert loan.num_tokens == min(computed, NUM_BLOCKS // 8 * BLOCK)
    lender.finish("long")
    lender.end(loan.loan_id)
    lender.assert_empty()


def test_a_request_that_finds_no_blocks_gets_those_that_are_lent(lender: Lender) -> None:
    tokens = prompt(121)
    lender.run(request("first", tokens, greedy(1)))
    loan = lender.ask(tokens)
    lender.add(request("large", prompt(1000, 3), greedy(1)))
    for _ in range(3):
        lender.step()
    assert lender.worker.revoked == [loan.loan_id]
    assert not lender.is_finished("large"), "its blocks are lent until the reader has confirmed"
    lender.end(loan.loan_id)
    lender.finish("large")
    lender.assert_empty()
