"""Engines that are not alike, over the real NIXL: every byte against a plain numpy reference.

An engine is one scheduler half and a worker half per tensor rank, each over memory of its own.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from engine_ext.common.config import ConnectorConfig
from engine_ext.common.orders import StepMetadata
from engine_ext.common.types import BlockIds, EngineIdentity, FinishStatus, TransferResults
from engine_ext.connector import build_worker
from engine_ext.scheduler.scheduler import SchedulerConnector
from tests.unit.engine_ext.layout.cache_model import Model, RankCache
from tests.unit.engine_ext.scheduler.fakes import Request

TOKENS = 100
MODEL = Model(layers=2, heads=4, head_bytes=64)
FACTORS = {"model": "m"}


class Aggregate:
    """What a host makes of its ranks' results: an id is reported once every rank has reported it,
    as failed if it failed on any."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._sent: Counter[str] = Counter()
        self._received: Counter[str] = Counter()
        self._failed: set[str] = set()

    def aggregate(self, by_rank: Sequence[TransferResults]) -> TransferResults:
        """`by_rank`: what each rank reported since the last call."""
        for results in by_rank:
            self._sent.update(results.finished_sending)
            self._received.update(results.finished_recving)
            self._failed |= results.failed_recving
        received = self._take(self._received)
        failed = received & self._failed
        self._failed -= failed
        return TransferResults(self._take(self._sent), received, failed)

    def _take(self, counts: Counter[str]) -> frozenset[str]:
        complete = frozenset(name for name, count in counts.items() if count >= self._num_ranks)
        for name in complete:
            del counts[name]
        return complete


@dataclass
class Engine:
    """`settings` are those of every rank's cache."""

    name: str
    port: int
    model: Model = MODEL
    tp_size: int = 1
    lease: float = 30
    mode: Any = "pull"
    permute: bool = False
    checksums: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = ConnectorConfig(
            engine_id=self.name,
            lease_duration=self.lease,
            transfer_mode=self.mode,
            permute_layout=self.permute,
            registration_timeout=20,
            checksums=self.checksums,
        )
        identity = EngineIdentity(
            self.name, "127.0.0.1", self.port, self.tp_size, compat_factors=FACTORS
        )
        seed = sum(self.name.encode())
        self.caches = [
            RankCache(self.model, rank=rank, size=self.tp_size, seed=seed + rank, **self.settings)
            for rank in range(self.tp_size)
        ]
        self.scheduler = SchedulerConnector(config, identity, self.caches[0].geometry())
        self.workers = [build_worker(config, cache.geometry(), identity) for cache in self.caches]
        self._aggregate = Aggregate(self.tp_size)
        for worker, cache in zip(self.workers, self.caches, strict=True):
            worker.register_kv_caches(cache.regions())
        self.tell_payloads()

    def tell_payloads(self) -> None:
        self.scheduler.set_handshake_metadata(
            {(0, rank): w.get_handshake_payload() for rank, w in enumerate(self.workers)}
        )

    def close(self) -> None:
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.shutdown()

    def step(self) -> StepMetadata:
        meta = self.scheduler.build_connector_meta()
        for worker in self.workers:
            worker.start_load_kv(meta)
        return meta

    def results(self) -> TransferResults:
        """The next that all ranks agree on."""
        deadline = time.monotonic() + 20
        while not (found := self._collect()):
            assert time.monotonic() < deadline, "no results"
            time.sleep(0.001)
        self.scheduler.update_connector_output(found)
        return found

    def _collect(self) -> TransferResults:
        return self._aggregate.aggregate([w.get_transfer_results() for w in self.workers])

    def prefill(self, request_id: str, blocks: BlockIds, params: Any = None) -> dict[str, Any]:
        asked = {"do_remote_decode": True, **(params or {})}
        request = Request(request_id, asked, TOKENS, TOKENS)
        self.scheduler.on_new_request(request)
        self.step()
        answer = self.scheduler.request_finished(request, blocks, FinishStatus.LENGTH_CAPPED)
        self.step()
        assert answer.kv_transfer_params is not None
        return answer.kv_transfer_params

    def load(self, request_id: str, params: Any, blocks: BlockIds, cached: int = 0) -> Request:
        request = Request(request_id, params, TOKENS)
        self.scheduler.on_new_request(request)
        missing, _ = self.scheduler.get_num_new_matched_tokens(request, cached)
        # Behind a window the last prompt token is computed again, from what it sees itself.
        has_windows = any(self.caches[0].geometry().group_windows)
        assert missing == TOKENS - has_windows - cached
        self.scheduler.update_state_after_alloc(request, blocks, missing)
        self.step()
        return request

    def stats(self, name: str) -> list[int]:
        return [getattr(worker.stats(), name) for worker in self.workers]


Launch = Callable[..., Engine]


@pytest.fixture
def launch(free_ports: Callable[[int], list[int]]) -> Iterator[Launch]:
    with ExitStack() as stack:

        def start(name: str, **settings: Any) -> Engine:
            engine = Engine(name, free_ports(1)[0], **settings)
            stack.callback(engine.close)
            return engine

        yield start


OK = TransferResults(finished_recving=frozenset(["d-1"]))
FAILED = TransferResults(finished_recving=frozenset(["d-1"]), failed_recving=frozenset(["d-1"]))
SENT = TransferResults(finished_sending=frozenset(["p-1"]))


def table(engine: Engine, first: int, step: int = 1) -> list[int]:
    """Enough blocks for the tokens, none of them the null block."""
    size, number = engine.caches[0].block_size, engine.caches[0].num_blocks
    ids = [1 + (first + i * step) % (number - 1) for i in range(-(-128 // size))]
    assert len(set(ids)) == len(ids)
    return ids


def used(engine: Engine, ids: list[int]) -> BlockIds:
    return (tuple(ids[: -(-TOKENS // engine.caches[0].block_size)]),)


def hand_over(prefiller: Engine, decoder: Engine, cached: int = 0) -> None:
    """P's KV to D, by whichever mode; then every byte of D's memory is checked."""
    kv = prefiller.model.kv(128)
    theirs, ours = table(prefiller, 19, step=-1), table(decoder, 5)
    for cache in prefiller.caches:
        cache.store(kv, theirs)
    unit = min(prefiller.caches[0].block_size, decoder.caches[0].block_size)
    loaded = range(cached, -(-TOKENS // unit) * unit)
    expected = [cache.after(kv, ours, loaded) for cache in decoder.caches]
    order(prefiller, decoder, used(prefiller, theirs), used(decoder, ours), cached)
    assert decoder.results() == OK
    for cache, right in zip(decoder.caches, expected, strict=True):
        assert (cache.memory == right).all(), f"rank {cache.rank}"
    assert prefiller.results() == SENT


def order(
    prefiller: Engine, decoder: Engine, theirs: BlockIds, ours: BlockIds, cached: int = 0
) -> None:
    if prefiller.mode == "push":
        decoder.load("d-1", push_params(prefiller), ours, cached)
        prefiller.prefill("p-1", theirs, {"transfer_id": "x"})
    else:
        decoder.load("d-1", prefiller.prefill("p-1", theirs), ours, cached)


def push_params(prefiller: Engine) -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "remote_engine_id": prefiller.name,
        "remote_host": "127.0.0.1",
        "remote_port": prefiller.port,
        "remote_request_id": "x",
        "tp_size": prefiller.tp_size,
        "transfer_id": "x",
    }


BLOCKS_OF_16 = {"num_blocks": 40}
BLOCKS_OF_32 = {"num_blocks": 25, "block_size": 32, "padding": 32}
MODES = pytest.mark.parametrize("mode", ["pull", "push"])


@MODES
@pytest.mark.parametrize("cached", [0, 32])
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (BLOCKS_OF_16, BLOCKS_OF_16),
        (BLOCKS_OF_16, BLOCKS_OF_32),
        (BLOCKS_OF_32, BLOCKS_OF_16),
    ],
)
def test_blocks_of_equal_and_of_other_sizes_are_moved_by_token(
    launch: Launch, theirs: dict[str, Any], ours: dict[str, Any], cached: int, mode: str
) -> None:
    prefiller = launch("p", settings=theirs, mode=mode)
    decoder = launch("d", settings=ours, mode=mode)
    hand_over(prefiller, decoder, cached)


@MODES
@pytest.mark.parametrize(
    ("p_size", "d_size", "heads"),
    [(2, 1, 4), (1, 2, 4), (4, 2, 4), (2, 4, 4), (2, 2, 4), (4, 1, 2), (1, 4, 2), (4, 2, 1)],
)
def test_ranks_of_another_number_move_the_heads_they_share(
    launch: Launch, p_size: int, d_size: int, heads: int, mode: str
) -> None:
    """2 heads on 4 ranks, and 1 head on 2 and 4, are copied."""
    model = Model(layers=2, heads=heads, head_bytes=32)
    prefiller = launch("p", model=model, tp_size=p_size, mode=mode, settings=BLOCKS_OF_16)
    decoder = launch("d", model=model, tp_size=d_size, mode=mode, settings=BLOCKS_OF_16)
    hand_over(prefiller, decoder)
    faced = max(1, p_size // d_size)
    assert decoder.stats("handshakes_ok") == [faced] * d_size


@MODES
def test_ranks_and_block_sizes_may_differ_at_once(launch: Launch, mode: str) -> None:
    prefiller = launch("p", tp_size=2, mode=mode, settings=BLOCKS_OF_32)
    decoder = launch("d", mode=mode, settings=BLOCKS_OF_16)
    hand_over(prefiller, decoder, cached=16)


@MODES
@pytest.mark.parametrize(("theirs", "ours"), [("LBNHC", "LBHNC"), ("LBHNC", "LBNHC")])
def test_another_order_of_heads_and_tokens_is_moved_when_permitted(
    launch: Launch, theirs: str, ours: str, mode: str
) -> None:
    prefiller = launch("p", mode=mode, permute=True, settings=BLOCKS_OF_16 | {"layout": theirs})
    decoder = launch("d", mode=mode, permute=True, settings=BLOCKS_OF_16 | {"layout": ours})
    hand_over(prefiller, decoder)


def test_another_order_of_heads_and_tokens_is_refused_by_default(
    launch: Launch, caplog: pytest.LogCaptureFixture
) -> None:
    prefiller = launch("p", settings=BLOCKS_OF_16 | {"layout": "LBNHC"})
    decoder = launch("d", settings=BLOCKS_OF_16)
    before = decoder.caches[0].memory.copy()
    order(prefiller, decoder, used(prefiller, table(prefiller, 1)), used(decoder, [*range(1, 9)]))
    assert decoder.results() == FAILED
    assert "kv_cache_layout differs: LBHNC here, LBNHC there" in caplog.text
    assert "enable_permute_local_kv" in caplog.text
    assert (decoder.caches[0].memory == before).all()


@MODES
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("BLHNC", "BLHNC"), ("BHLNC", "BHLNC"), ("BLHNC", "LBHNC"), ("LBHNC", "BLHNC")],
)
def test_blocks_that_hold_all_layers_may_be_on_both_sides_or_on_one(
    launch: Launch, theirs: str, ours: str, mode: str
) -> None:
    prefiller = launch("p", mode=mode, settings=BLOCKS_OF_16 | {"layout": theirs})
    decoder = launch("d", mode=mode, settings=BLOCKS_OF_16 | {"layout": ours})
    hand_over(prefiller, decoder)


@MODES
def test_a_window_group_moves_what_its_window_keeps_and_no_hole(launch: Launch, mode: str) -> None:
    settings = {"num_blocks": 40, "groups": (0, 1), "windows": (None, 32)}
    prefiller = launch("p", mode=mode, settings=settings)
    decoder = launch("d", mode=mode, settings=settings)
    kv, cache = MODEL.kv(112), decoder.caches[0]
    theirs = tuple(range(1, 8)), (0, 0, 0, *range(24, 20, -1))
    ours = tuple(range(19, 12, -1)), (0, 0, 0, 0, *range(31, 34))
    prefiller.caches[0].store(kv, theirs[0])
    prefiller.caches[0].blocks[list(theirs[1][3:])] = prefiller.caches[0].blocks[[4, 5, 6, 7]]
    expected = cache.after(kv, ours[0], range(112), layers=[0])
    held, cache.memory[:] = cache.memory.copy(), expected
    expected = cache.after(kv, ours[1], range(112), layers=[1])
    cache.memory[:] = held
    order(prefiller, decoder, theirs, ours)
    assert decoder.results() == OK
    assert (cache.memory == expected).all()
    assert prefiller.results() == SENT


@pytest.mark.parametrize(("p_size", "d_size"), [(2, 1), (1, 2)])
def test_every_rank_is_kept_alive_while_a_decoder_queues_and_let_go_when_it_leaves(
    launch: Launch, p_size: int, d_size: int
) -> None:
    prefiller = launch("p", tp_size=p_size, settings=BLOCKS_OF_16)
    decoder = launch("d", tp_size=d_size, settings=BLOCKS_OF_16)
    params = prefiller.prefill("p-1", used(prefiller, table(prefiller, 1)))
    request = Request("d-1", params, TOKENS)
    decoder.scheduler.on_new_request(request)
    decoder.step()
    deadline = time.monotonic() + 20
    while 0 in prefiller.stats("heartbeats_received"):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    decoder.scheduler.request_finished(request, ((),), FinishStatus.ABORTED)
    decoder.step()
    assert prefiller.results() == SENT
    assert prefiller.stats("leases_expired") == [0] * p_size


@MODES
def test_one_rank_that_does_not_answer_fails_the_whole_load(launch: Launch, mode: str) -> None:
    prefiller = launch("p", tp_size=2, lease=3, mode=mode, settings=BLOCKS_OF_16)
    decoder = launch("d", mode=mode, settings=BLOCKS_OF_16)
    prefiller.scheduler.shutdown()
    prefiller.scheduler.set_handshake_metadata(
        {(0, 0): prefiller.workers[0].get_handshake_payload()}
    )
    theirs, ours = table(prefiller, 19, step=-1), table(decoder, 5)
    order(prefiller, decoder, used(prefiller, theirs), used(decoder, ours))
    assert decoder.results() == FAILED
    assert prefiller.results() == SENT


def test_an_engine_that_is_told_its_payloads_again_goes_on(launch: Launch) -> None:
    """As by vLLM 0.33 when it wakes up; its port is taken, by itself."""
    prefiller = launch("p", settings=BLOCKS_OF_16)
    decoder = launch("d", settings=BLOCKS_OF_16)
    prefiller.tell_payloads()
    theirs, ours = table(prefiller, 19, step=-1), table(decoder, 5)
    order(prefiller, decoder, used(prefiller, theirs), used(decoder, ours))
    assert decoder.results() == OK
    assert prefiller.results() == SENT


def test_a_rank_that_answers_for_another_is_refused(
    launch: Launch, caplog: pytest.LogCaptureFixture
) -> None:
    prefiller = launch("p", tp_size=2, settings=BLOCKS_OF_16)
    decoder = launch("d", settings=BLOCKS_OF_16)
    prefiller.scheduler.shutdown()
    payload = prefiller.workers[0].get_handshake_payload()
    prefiller.scheduler.set_handshake_metadata({(0, 0): payload, (0, 1): payload})
    theirs, ours = table(prefiller, 19, step=-1), table(decoder, 5)
    order(prefiller, decoder, used(prefiller, theirs), used(decoder, ours))
    assert decoder.results() == FAILED
    assert "TensorRank(rank=0, size=2) answers where TensorRank(rank=1, size=2) was" in caplog.text
