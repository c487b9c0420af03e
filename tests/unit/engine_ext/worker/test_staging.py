"""Host buffers: what is copied when, and what happens when it cannot be."""

import pytest
import torch

from engine_ext.common.config import ConnectorConfig
from engine_ext.common.orders import (
    LeaseCancel,
    LeaseGrant,
    PullOrder,
    PushOffer,
    Revoke,
    SaveOrder,
    StepMetadata,
)
from engine_ext.common.support import UnsupportedError
from engine_ext.common.types import (
    SHARED,
    BlockIds,
    CacheGeometry,
    EngineIdentity,
    PeerAddress,
    Region,
    RemoteSource,
    TransferResults,
)
from engine_ext.scheduler.save_plan import SavePlanner
from engine_ext.worker.staging import StagedTransfers
from engine_ext.worker.torch_memory import HostBuffer
from engine_ext.worker.worker import WorkerConnector
from tests.unit.engine_ext.orders import ordered
from tests.unit.engine_ext.scheduler.fakes import FakeAgent, regions

IDS = ((10, 11, 12, 13), (20, 21, 22, 23))


class FakeStaging:
    def __init__(self) -> None:
        self.regions: tuple[Region, ...] = ()
        self.saved: list[BlockIds] = []
        self.loaded: list[BlockIds] = []
        self.is_broken = False

    def save(self, block_ids: BlockIds) -> None:
        self._copy(self.saved, block_ids)

    def load(self, block_ids: BlockIds) -> None:
        self._copy(self.loaded, block_ids)

    def _copy(self, done: list[BlockIds], block_ids: BlockIds) -> None:
        if self.is_broken:
            raise RuntimeError("no memory")
        done.append(block_ids)


@pytest.fixture
def staging() -> FakeStaging:
    return FakeStaging()


@pytest.fixture
def staged(staging: FakeStaging) -> StagedTransfers:
    return StagedTransfers(staging, block_size=4)


def pull(request_id: str, first_token: int, last_token: int) -> PullOrder:
    source = RemoteSource(PeerAddress("p", "127.0.0.1", 1), "theirs", 1, IDS, 16)
    return PullOrder(request_id, source, IDS, first_token, last_token)


def test_each_step_saves_the_blocks_it_wrote() -> None:
    planner = SavePlanner(4)
    assert planner.plan("r", IDS, 0, 6).block_ids == ((10, 11), (20, 21))
    assert planner.plan("r", IDS, 6, 3).block_ids == ((11, 12), (21, 22))
    assert planner.plan("r", IDS, 9, 1).block_ids == ((12,), (22,))


def test_the_first_step_saves_what_was_there_before_it() -> None:
    assert SavePlanner(4).plan("r", IDS, 8, 1).block_ids == ((10, 11, 12), (20, 21, 22))


@pytest.mark.parametrize("num_computed", [0, 4, 10, 12])
def test_a_request_that_was_preempted_saves_all_of_its_new_blocks(num_computed: int) -> None:
    """At 10 as well, which it had reached when it was preempted: another request's blocks of the
    same content may be what it finds."""
    planner = SavePlanner(4)
    planner.plan("r", IDS, 0, 10)
    other = ((30, 31, 32, 33), (20, 21, 22, 23))
    order = planner.plan("r", other, num_computed, 2)
    assert order.block_ids == tuple(ids[: -(-(num_computed + 2) // 4)] for ids in other)


def test_a_block_that_a_window_has_left_is_not_missed() -> None:
    planner = SavePlanner(4)
    planner.plan("r", IDS, 0, 12)
    assert planner.plan("r", (IDS[0], (0, *IDS[1][1:])), 12, 1).block_ids == ((13,), (23,))


def test_an_id_that_is_used_again_begins_anew() -> None:
    planner = SavePlanner(4)
    planner.plan("r", IDS, 0, 8)
    planner.forget("r")
    assert planner.plan("r", IDS, 8, 1).block_ids == ((10, 11, 12), (20, 21, 22))


def test_what_came_is_loaded_once_and_only_what_came(
    staged: StagedTransfers, staging: FakeStaging
) -> None:
    staged.begin(StepMetadata((pull("a", 4, 10), pull("b", 0, 16))))
    results = TransferResults(
        finished_recving=frozenset({"a", "b"}), failed_recving=frozenset({"b"})
    )
    assert staged.finish_loads(results) == results
    assert staging.loaded == [((11, 12), (21, 22))]


def test_what_cannot_be_loaded_has_failed(staged: StagedTransfers, staging: FakeStaging) -> None:
    staged.begin(StepMetadata((pull("a", 0, 10),)))
    staging.is_broken = True
    results = staged.finish_loads(TransferResults(finished_recving=frozenset({"a"})))
    assert results.failed_recving == {"a"}


def test_what_cannot_be_saved_is_revoked_with_its_grant(
    staged: StagedTransfers, staging: FakeStaging
) -> None:
    staging.is_broken = True
    staged.save([SaveOrder("a", IDS), SaveOrder("b", IDS)])
    offers = PushOffer("a", IDS, 10, b""), PushOffer("c", IDS, 10, b"")
    both = StepMetadata((LeaseGrant("a", 30), LeaseGrant("c", 30), *offers))
    begun = staged.begin(both)
    assert ordered(begun, Revoke) == ("a",)
    assert ordered(begun, PushOffer) == offers[1:], "what is not there is not pushed"
    staged.begin(StepMetadata((LeaseCancel("b"),)))
    assert ordered(staged.begin(StepMetadata((LeaseGrant("b", 30),))), Revoke) == ()


def cache() -> tuple[torch.Tensor, list[Region]]:
    """Two layers of 8 blocks of 6 bytes with 2 between them, one per group, and a shared one."""
    memory = torch.arange(3 * 8 * 8, dtype=torch.uint8)
    base = memory.data_ptr()
    return memory, [
        Region(f"layer{i}", base + 64 * i, 6, 8, 8, mem_type="VRAM", group=group)
        for i, group in enumerate((0, 1, SHARED))
    ]


def test_blocks_go_to_the_mirror_and_back_and_others_stay() -> None:
    memory, described = cache()
    buffer = HostBuffer(described, [memory.untyped_storage()] * 3)
    assert [(r.mem_type, r.block_len, r.block_stride) for r in buffer.regions] == [
        ("DRAM", 6, 6)
    ] * 3
    before = memory.clone().view(3, 8, 8)
    buffer.save(((1, 2, 5), (4,)))
    memory.zero_()
    buffer.load(((5, 2, 1, 7), (4, 0)))
    after = memory.view(3, 8, 8)
    for layer, blocks in enumerate(({1, 2, 5}, {4}, {1, 2, 4, 5})):
        for block in range(8):
            want = before[layer, block, :6] if block in blocks else torch.zeros(6)
            assert after[layer, block, :6].tolist() == want.tolist()
    assert not after[:, :, 6:].any()


def test_an_engine_without_host_buffers_refuses_to_stage() -> None:
    geometry = CacheGeometry(block_size=16, num_blocks=32, is_staged=True)
    identity = EngineIdentity("e", "127.0.0.1", 1)
    config = ConnectorConfig(engine_id="e")
    worker = WorkerConnector(config, geometry, identity, lambda *_: FakeAgent())
    with pytest.raises(UnsupportedError, match="no host buffers"):
        worker.register_kv_caches(regions())
