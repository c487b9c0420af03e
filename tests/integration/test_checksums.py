"""`kv_checksum` over the real NIXL: one bit that flips and two blocks that change places are found,
wherever it happens between P's lease and D's first token."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from engine_ext.common.config import ConnectorConfig
from engine_ext.common.types import STATE, BlockIds, FinishStatus, TransferResults
from engine_ext.worker.agent import Transfer, TransferState
from tests.integration import memory_engine, test_plan_nixl
from tests.integration.legs import decode, decode_body, prefill
from tests.integration.memory_engine import BLOCKS, LAYERS, TOKENS, WatchedAgent
from tests.integration.oracle import Answer, complete, differences, text_of
from tests.integration.processes import Launcher, Server, described, metric
from tests.integration.processes import wait_for as reached
from tests.integration.test_plan_nixl import (
    BLOCKS_OF_16,
    BLOCKS_OF_32,
    FAILED,
    OK,
    SENT,
    Engine,
    Launch,
    hand_over,
)
from tests.unit.engine_ext.scheduler.fakes import Request

BLOCK_BYTES = 1 << 17
"""32 MB in all: several slices of work, beside which the READ runs."""
OURS, THEIRS = tuple(range(BLOCKS - 1, 0, -1)), tuple(range(1, BLOCKS))
CHECKED = {"kv_checksum": True}
SWAPPING = "tests.integration.swapping_engine"
STAGING = "tests.integration.staging_engine"
launch = test_plan_nixl.launch
"""Engines of several ranks, or other layouts."""
Spoil = Callable[[Any], None]
"""Changes a cache, [layers, blocks, bytes]."""


class SpoilingAgent(WatchedAgent):
    """Changes what a READ has brought as soon as NIXL says that it is done."""

    cache: Any = None
    spoil: Spoil = staticmethod(lambda cache: None)

    def poll(self, transfer: Transfer) -> TransferState:
        state = super().poll(transfer)
        if state is TransferState.DONE:
            self.spoil(self.cache)
        return state


class Memory(memory_engine.Memory):
    def open_agent(self, regions: Any, config: ConnectorConfig) -> WatchedAgent:
        self.agent = self.spoiling = SpoilingAgent(regions, config)
        self.spoiling.cache = self.cache
        return self.agent

    def prefill(self) -> dict[str, Any]:
        """P has a prompt, whose lease has begun and whose checksums are made."""
        self.cache[:] = np.random.default_rng(1).integers(0, 256, self.cache.shape, dtype=np.uint8)
        request = Request("p-1", {"do_remote_decode": True}, TOKENS, TOKENS)
        scheduler, worker = self.connector.scheduler, self.connector.worker
        scheduler.on_new_request(request)
        answer = scheduler.request_finished(request, (THEIRS,), FinishStatus.LENGTH_CAPPED)
        self.step()
        reached(lambda: worker.stats().leases_active == 1, "the lease has begun")
        assert answer.kv_transfer_params is not None
        return answer.kv_transfer_params

    def load(self, params: dict[str, Any]) -> TransferResults:
        request = Request("d-1", params, TOKENS)
        scheduler, worker = self.connector.scheduler, self.connector.worker
        scheduler.on_new_request(request)
        missing, _ = scheduler.get_num_new_matched_tokens(request, 0)
        scheduler.update_state_after_alloc(request, (OURS,), missing or 0)
        self.step()
        return reached(worker.get_transfer_results, "the load is reported")

    def is_free(self) -> bool:
        return self.connector.worker.get_transfer_results() == SENT

    def counted(self) -> tuple[int, int, int]:
        stats = self.connector.worker.stats()
        return stats.loads_verified, stats.loads_unverified, stats.loads_corrupted


@pytest.fixture
def start(free_ports: Callable[[int], list[int]]) -> Iterator[Callable[..., Memory]]:
    with ExitStack() as stack:

        def started(name: str, block_bytes: int = BLOCK_BYTES, **settings: Any) -> Memory:
            config = ConnectorConfig(engine_id=name, **{"checksums": True, **settings})
            memory = Memory(name, free_ports(1)[0], block_bytes, config)
            stack.callback(memory.connector.shutdown)
            return memory

        yield started


def flip(layer: int, block: int, byte: int) -> Spoil:
    def spoil(cache: Any) -> None:
        cache[layer, block, byte] ^= 0x10

    return spoil


def swap_blocks(cache: Any) -> None:
    cache[:, [5, 40]] = cache[:, [40, 5]]


def swap_layers(cache: Any) -> None:
    cache[[0, 2], 7] = cache[[2, 0], 7]


SPOILT: list[Spoil] = [
    flip(0, OURS[0], 0),
    flip(LAYERS - 1, OURS[-1], BLOCK_BYTES - 1),
    flip(2, 31, 77777),
    swap_blocks,
    swap_layers,
]


@pytest.mark.parametrize("spoil", SPOILT)
def test_bytes_that_change_on_their_way_fail_the_load(
    start: Callable[..., Memory], spoil: Spoil
) -> None:
    prefiller, decoder = start("p"), start("d")
    decoder.spoiling.spoil = spoil
    assert decoder.load(prefiller.prefill()) == FAILED
    assert decoder.counted() == (0, 0, 1)
    reached(
        lambda: prefiller.connector.worker.get_transfer_results() == SENT, "P's blocks are free"
    )


@pytest.mark.parametrize("spoil", [flip(0, OURS[0], 0), swap_blocks])
def test_without_checksums_the_same_bytes_are_used(
    start: Callable[..., Memory], spoil: Spoil
) -> None:
    """The faults are real."""
    prefiller, decoder = start("p"), start("d", checksums=False)
    decoder.spoiling.spoil = spoil
    assert decoder.load(prefiller.prefill()) == OK
    assert not (decoder.cache[:, OURS] == prefiller.cache[:, THEIRS]).all()


def test_bytes_that_arrive_as_they_were_are_verified(start: Callable[..., Memory]) -> None:
    prefiller, decoder = start("p"), start("d")
    assert decoder.load(prefiller.prefill()) == OK
    assert decoder.counted() == (1, 0, 0)
    assert (decoder.cache[:, OURS] == prefiller.cache[:, THEIRS]).all()
    reached(
        lambda: prefiller.connector.worker.get_transfer_results() == SENT, "P's blocks are free"
    )


def test_a_bit_that_flips_at_the_holder_after_the_lease_fails_the_load(
    start: Callable[..., Memory],
) -> None:
    """The blocks are small: their checksums are made when the lease is counted."""
    prefiller, decoder = start("p", block_bytes=512), start("d", block_bytes=512)
    params = prefiller.prefill()
    flip(1, THEIRS[3], 100)(prefiller.cache)
    assert decoder.load(params) == FAILED
    assert decoder.counted() == (0, 0, 1)


def test_a_holder_without_checksums_is_read_and_counted(start: Callable[..., Memory]) -> None:
    prefiller, decoder = start("p", checksums=False), start("d")
    assert decoder.load(prefiller.prefill()) == OK
    assert decoder.counted() == (0, 1, 0)


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("cached", [0, 32])
def test_each_rank_verifies_what_it_holds(
    launch: Launch, layout: str, size: int, cached: int
) -> None:
    settings = {"settings": BLOCKS_OF_16 | {"layout": layout, "padding": 16}, "tp_size": size}
    prefiller = launch("p", checksums=True, **settings)
    decoder = launch("d", checksums=True, **settings)
    hand_over(prefiller, decoder, cached)
    assert decoder.stats("loads_verified") == [1] * size


def test_one_rank_whose_bytes_changed_fails_the_load_of_all(launch: Launch) -> None:
    prefiller = launch("p", checksums=True, tp_size=2, settings=BLOCKS_OF_16)
    decoder = launch("d", checksums=True, tp_size=2, settings=BLOCKS_OF_16)
    blocks = (tuple(range(1, 8)),)
    params = prefiller.prefill("p-1", blocks)
    reached(lambda: prefiller.stats("leases_active") == [1, 1], "the leases have begun")
    prefiller.caches[1].blocks[3, 0, 0, 0, 0] ^= 1
    decoder.load("d-1", params, blocks)
    assert decoder.results() == FAILED
    assert decoder.stats("loads_corrupted") == [0, 1]
    assert decoder.stats("loads_verified") == [1, 0]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"tp_size": 2}, {"tp_size": 1}),
        ({"tp_size": 1}, {"tp_size": 2}),
        ({"settings": BLOCKS_OF_32}, {}),
        ({"settings": BLOCKS_OF_16 | {"layout": "BLHNC"}}, {}),
    ],
)
def test_blocks_laid_out_otherwise_are_read_and_counted_as_unverified(
    launch: Launch, theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    prefiller = launch("p", checksums=True, **{"settings": BLOCKS_OF_16, **theirs})
    decoder = launch("d", checksums=True, **{"settings": BLOCKS_OF_16, **ours})
    hand_over(prefiller, decoder)
    assert decoder.stats("loads_unverified") == [1] * decoder.tp_size
    assert decoder.stats("loads_verified") == [0] * decoder.tp_size


@pytest.mark.parametrize("window", [32, STATE])
@pytest.mark.parametrize("spoilt", [None, 0, 1])
def test_each_group_is_verified(launch: Launch, window: int, spoilt: int | None) -> None:
    """Beside full attention, a sliding window or a state; `spoilt`: the group that changes."""
    settings = {"num_blocks": 40, "groups": (0, 1), "windows": (None, window)}
    prefiller = launch("p", checksums=True, settings=settings)
    decoder = launch("d", checksums=True, settings=settings)
    last = (22,) if window == STATE else (0, 0, 0, 24, 23, 22, 21)
    theirs = (tuple(range(1, 8)), last)
    ours = (tuple(range(19, 12, -1)), (33,) if window == STATE else (0, 0, 0, 0, 31, 32, 33))
    # A state that knows the last token would count it twice: P leaves it out.
    params = prefilled(prefiller, theirs, test_plan_nixl.TOKENS - (window == STATE))
    reached(lambda: prefiller.stats("leases_active") == [1], "the lease has begun")
    if spoilt is not None:
        prefiller.caches[0].blocks[(6, 22)[spoilt], spoilt, 3, 2, 1] ^= 128
    load(decoder, params, ours)
    assert decoder.results() == (OK if spoilt is None else FAILED)
    verified, corrupted = decoder.stats("loads_verified"), decoder.stats("loads_corrupted")
    assert (verified, corrupted) == (([1], [0]) if spoilt is None else ([0], [1]))


def prefilled(prefiller: Engine, blocks: BlockIds, num_tokens: int) -> dict[str, Any]:
    request = Request("p-1", {"do_remote_decode": True}, num_tokens, num_tokens)
    prefiller.scheduler.on_new_request(request)
    answer = prefiller.scheduler.request_finished(request, blocks, FinishStatus.LENGTH_CAPPED)
    prefiller.step()
    assert answer.kv_transfer_params is not None
    return answer.kv_transfer_params


def load(decoder: Engine, params: dict[str, Any], blocks: BlockIds) -> None:
    """As many tokens as the scheduler half says."""
    request = Request("d-1", params, test_plan_nixl.TOKENS)
    decoder.scheduler.on_new_request(request)
    missing, _ = decoder.scheduler.get_num_new_matched_tokens(request, 0)
    assert missing
    decoder.scheduler.update_state_after_alloc(request, blocks, missing)
    decoder.step()


PREFILLER = described("prefill", extra=CHECKED)
PROMPT = text_of(300, 40)


def test_two_swapped_blocks_change_an_answer_that_nothing_checks(
    launcher: Launcher, prefiller: Server, alone: Server
) -> None:
    with launcher.engine("decode", module=SWAPPING) as decoder:
        answer = decode(decoder, PROMPT, prefill(prefiller, PROMPT)).answer
    assert differences([complete(alone, PROMPT)], [answer])


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_with_checksums_it_ends_as_the_policy_says(
    launcher: Launcher, prefiller: Server, alone: Server, policy: str
) -> None:
    with launcher.engine("decode", module=SWAPPING, extra=CHECKED, policy=policy) as decoder:
        params = prefill(prefiller, PROMPT)
        answer = decoder.post("/v1/completions", decode_body(PROMPT, params))
        assert metric(decoder, "disagg_engine_kv_loads_corrupted_total") == 1
        if policy == "fail":
            assert answer.status_code == 500
        else:
            assert answer.status_code == 200, answer.text
            computed = Answer.in_body(answer.json())
            assert differences([complete(alone, PROMPT)], [computed]) == []


def test_what_travels_between_host_buffers_is_verified(launcher: Launcher, alone: Server) -> None:
    with (
        launcher.engine("prefill", module=STAGING, extra=CHECKED) as prefiller,
        launcher.engine("decode", module=STAGING, extra=CHECKED) as decoder,
    ):
        answer = decode(decoder, PROMPT, prefill(prefiller, PROMPT)).answer
        assert metric(decoder, "disagg_engine_kv_loads_verified_total") == 1
    assert differences([complete(alone, PROMPT)], [answer]) == []
