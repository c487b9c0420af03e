"""The connector core over the real NIXL, without an engine: bytes and leases."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from engine_ext.common.config import ConnectorConfig, TransferMode
from engine_ext.common.types import BlockIds, CacheGeometry, FinishStatus, TransferResults
from engine_ext.connector import Connector, build_connector
from tests.integration.memory_engine import layer_regions
from tests.unit.engine_ext.scheduler.fakes import Request
from tests.unit.engine_ext.wire.waiting import until

LAYERS, BLOCKS, BLOCK_BYTES, BLOCK_SIZE = 4, 64, 4096, 16
TOKENS = 100


@dataclass
class Memory:
    """KV of four layers in host memory, and a connector over it."""

    name: str
    port: int
    lease: float = 30
    model: str = "bytes"
    mode: TransferMode = "pull"
    cache: npt.NDArray[np.uint8] = field(init=False)
    connector: Connector = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(list(self.name.encode()))
        shape = (LAYERS, BLOCKS, BLOCK_BYTES)
        self.cache = rng.integers(0, 255, shape, dtype=np.uint8)
        self.connector = build_connector(
            ConnectorConfig(
                engine_id=self.name, lease_duration=self.lease, transfer_mode=self.mode
            ),
            CacheGeometry(BLOCK_SIZE, BLOCKS),
            host="127.0.0.1",
            port=self.port,
            model_factors={"model": self.model},
        )
        self.connector.start(layer_regions(self.cache, "model.layers.{}.self_attn.attn"))

    def prefill(self, request_id: str, blocks: BlockIds) -> dict[str, Any]:
        """Ends with the one step that hands the finished request over."""
        request = Request(request_id, {"do_remote_decode": True}, TOKENS, TOKENS)
        self.connector.scheduler.on_new_request(request)
        answer = self.connector.scheduler.request_finished(
            request, blocks, FinishStatus.LENGTH_CAPPED
        )
        self.step()
        assert answer.kv_transfer_params is not None
        return answer.kv_transfer_params

    def load(self, request_id: str, params: Any, blocks: BlockIds, cached: int = 0) -> Request:
        request = Request(request_id, params, TOKENS)
        self.connector.scheduler.on_new_request(request)
        missing, _ = self.connector.scheduler.get_num_new_matched_tokens(request, cached)
        assert missing == TOKENS - cached
        self.connector.scheduler.update_state_after_alloc(request, blocks, missing)
        self.step()
        return request

    def step(self) -> None:
        self.connector.worker.start_load_kv(self.connector.scheduler.build_connector_meta())

    def results(self) -> TransferResults:
        found: TransferResults = until(self.connector.worker.get_transfer_results)
        return found


@pytest.fixture
def pulling(free_ports: Callable[[int], list[int]]) -> Iterator[tuple[Memory, Memory]]:
    first, second = free_ports(2)
    prefiller, decoder = Memory("p", first, lease=4), Memory("d", second, lease=4)
    yield prefiller, decoder
    decoder.connector.shutdown()
    prefiller.connector.shutdown()


DESCENDING: BlockIds = (tuple(range(20, 13, -1)),)
SCATTERED: BlockIds = ((3, 60, 8, 41, 2, 40, 39),)


@pytest.mark.parametrize("cached", [0, 32, 96])
def test_the_missing_blocks_arrive_whole_and_no_other_is_touched(
    pulling: tuple[Memory, Memory], cached: int
) -> None:
    prefiller, decoder = pulling
    before = decoder.cache.copy()
    params = prefiller.prefill("p-1", DESCENDING)
    decoder.load("d-1", params, SCATTERED, cached)
    assert decoder.results() == TransferResults(finished_recving=frozenset(["d-1"]))
    skipped = cached // BLOCK_SIZE
    ours, theirs = SCATTERED[0][skipped:], DESCENDING[0][skipped:]
    assert (decoder.cache[:, ours] == prefiller.cache[:, theirs]).all()
    others = [block for block in range(BLOCKS) if block not in ours]
    assert (decoder.cache[:, others] == before[:, others]).all()
    assert decoder.connector.worker.stats().blocks_received == len(ours)
    assert prefiller.results() == TransferResults(finished_sending=frozenset(["p-1"]))


def test_a_queued_decoder_keeps_the_lease_and_its_abort_ends_it(
    pulling: tuple[Memory, Memory],
) -> None:
    prefiller, decoder = pulling
    params = prefiller.prefill("p-1", DESCENDING)
    request = Request("d-1", params, TOKENS)
    decoder.connector.scheduler.on_new_request(request)
    decoder.step()
    worker, started = prefiller.connector.worker, time.monotonic()
    until(lambda: time.monotonic() - started > 2 * prefiller.lease)
    assert worker.stats().leases_active == 1
    assert not worker.get_transfer_results()
    decoder.connector.scheduler.request_finished(request, ((),), FinishStatus.ABORTED)
    decoder.step()
    assert prefiller.results() == TransferResults(finished_sending=frozenset(["p-1"]))
    assert worker.stats().leases_expired == 0


def test_a_lease_nobody_reads_runs_out(pulling: tuple[Memory, Memory]) -> None:
    prefiller, _ = pulling
    started = time.monotonic()
    prefiller.prefill("p-1", DESCENDING)
    assert prefiller.results() == TransferResults(finished_sending=frozenset(["p-1"]))
    assert time.monotonic() - started >= prefiller.lease
    assert prefiller.connector.worker.stats().leases_expired == 1


def test_an_engine_of_another_model_is_not_read(
    pulling: tuple[Memory, Memory], free_ports: Callable[[int], list[int]]
) -> None:
    prefiller, _ = pulling
    stranger = Memory("o", free_ports(1)[0], model="other")
    before = stranger.cache.copy()
    stranger.load("d-1", prefiller.prefill("p-1", DESCENDING), SCATTERED)
    assert stranger.results().failed_recving == frozenset(["d-1"])
    assert (stranger.cache == before).all()
    stranger.connector.shutdown()


@pytest.fixture
def pushing(free_ports: Callable[[int], list[int]]) -> Iterator[tuple[Memory, Memory]]:
    first, second = free_ports(2)
    prefiller, decoder = Memory("p", first, mode="push"), Memory("d", second, mode="push")
    yield prefiller, decoder
    decoder.connector.shutdown()
    prefiller.connector.shutdown()


def told_to_push(prefiller: Memory) -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "remote_engine_id": prefiller.name,
        "remote_host": "127.0.0.1",
        "remote_port": prefiller.port,
        "tp_size": 1,
        "remote_request_id": "x",
    }


@pytest.mark.parametrize("first", ["prefill", "decode"])
@pytest.mark.parametrize("cached", [0, 32])
def test_a_push_needs_no_further_step_of_the_prefiller(
    pushing: tuple[Memory, Memory], first: str, cached: int
) -> None:
    prefiller, decoder = pushing
    before = decoder.cache.copy()
    ids = ("cmpl-x-0-00000001", "cmpl-x-0-00000002")
    params = told_to_push(prefiller)
    if first == "prefill":
        prefiller.prefill(ids[0], DESCENDING)
        decoder.load(ids[1], params, SCATTERED, cached)
    else:
        decoder.load(ids[1], params, SCATTERED, cached)
        prefiller.prefill(ids[0], DESCENDING)
    # From here on nobody steps the prefiller: no start_load_kv, no get_transfer_results.
    assert decoder.results() == TransferResults(finished_recving=frozenset([ids[1]]))
    skipped = cached // BLOCK_SIZE
    ours, theirs = SCATTERED[0][skipped:], DESCENDING[0][skipped:]
    assert (decoder.cache[:, ours] == prefiller.cache[:, theirs]).all()
    others = [block for block in range(BLOCKS) if block not in ours]
    assert (decoder.cache[:, others] == before[:, others]).all()
    assert prefiller.results() == TransferResults(finished_sending=frozenset([ids[0]]))


def test_a_withdrawn_registration_is_never_written(pushing: tuple[Memory, Memory]) -> None:
    prefiller, decoder = pushing
    request = decoder.load("cmpl-x-0-00000002", told_to_push(prefiller), SCATTERED)
    until(lambda: decoder.connector.worker.stats().handshakes_ok)
    decoder.connector.scheduler.request_finished(request, SCATTERED, FinishStatus.ABORTED)
    decoder.step()
    assert decoder.results().failed_recving == frozenset(["cmpl-x-0-00000002"])
    # The blocks are the engine's again: a canary in them must survive the prefill that comes late.
    decoder.cache[:, SCATTERED[0]] = 0xAA
    prefiller.prefill("cmpl-x-0-00000001", DESCENDING)
    assert prefiller.results() == TransferResults(finished_sending=frozenset(["cmpl-x-0-00000001"]))
    assert (decoder.cache[:, SCATTERED[0]] == 0xAA).all()
    assert prefiller.connector.worker.stats().pushes_ok == 0


def test_a_push_of_another_prompt_is_refused(pushing: tuple[Memory, Memory]) -> None:
    prefiller, decoder = pushing
    request = Request("cmpl-x-0-00000002", told_to_push(prefiller), TOKENS - 1)
    scheduler = decoder.connector.scheduler
    scheduler.on_new_request(request)
    scheduler.update_state_after_alloc(request, SCATTERED, TOKENS - 1)
    decoder.step()
    prefiller.prefill("cmpl-x-0-00000001", DESCENDING)
    assert decoder.results().failed_recving == frozenset(["cmpl-x-0-00000002"])
    assert prefiller.connector.worker.stats().pushes_ok == 0
