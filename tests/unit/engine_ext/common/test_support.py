from dataclasses import replace

import pytest

from engine_ext.common.config import ConnectorConfig
from engine_ext.common.support import UnsupportedError, refuse_unsupported_memory
from engine_ext.common.types import STATE, CacheGeometry, EngineIdentity, Region
from engine_ext.connector import build_connector
from engine_ext.wire.handshake import NOT_FOR_STOCK, decode_metadata, decode_payload
from engine_ext.worker.worker import WorkerConnector
from tests.unit.engine_ext.scheduler.fakes import FakeAgent, regions

CONFIG = ConnectorConfig(engine_id="e")
CHECKED_PUSH = replace(CONFIG, checksums=True, transfer_mode="push")
GEOMETRY = CacheGeometry(block_size=16, num_blocks=32)
STAGED_STATES = replace(GEOMETRY, group_windows=(None, STATE), is_staged=True)
IDENTITY = EngineIdentity("e", "127.0.0.1", 1)


@pytest.mark.parametrize(
    ("config", "geometry", "identity", "word"),
    [
        (CONFIG, STAGED_STATES, IDENTITY, "host buffers with layers that keep"),
        (CONFIG, GEOMETRY, replace(IDENTITY, dcp_size=2), "decode context parallel size 2"),
        (CONFIG, GEOMETRY, replace(IDENTITY, pcp_size=2), "prefill context parallel size 2"),
        (CHECKED_PUSH, GEOMETRY, IDENTITY, "kv_checksum in push mode"),
    ],
)
def test_what_cannot_be_moved_is_refused_at_start_by_name(
    config: ConnectorConfig, geometry: CacheGeometry, identity: EngineIdentity, word: str
) -> None:
    with pytest.raises(UnsupportedError, match=word) as caught:
        WorkerConnector(config, geometry, identity)
    assert "\n" not in str(caught.value)


def test_a_host_of_both_halves_is_refused_alike() -> None:
    with pytest.raises(UnsupportedError, match="keep a state"):
        build_connector(CONFIG, STAGED_STATES, host="127.0.0.1", port=1, model_factors={})


VRAM = tuple(replace(region, mem_type="VRAM") for region in regions())
TOGETHER = (Region("all", 0x1000, 64, 64, 8, members=("a", "b")),)


@pytest.mark.parametrize(
    ("config", "memory", "word"),
    [
        (replace(CONFIG, buffer_device="cpu"), VRAM, "kv_buffer_device cpu"),
        (replace(CONFIG, buffer_device="cuda"), regions(), "kv_buffer_device cuda"),
        (replace(CONFIG, cross_layers_blocks=True), regions(), "enable_cross_layers_blocks"),
        (CONFIG, (replace(regions()[0], group=-2),), "no KV-cache group"),
        (replace(CONFIG, checksums=True), VRAM, "kv_checksum: this engine's KV memory cannot"),
    ],
)
def test_memory_that_does_not_go_with_the_configuration_is_refused_at_start(
    config: ConnectorConfig, memory: tuple[Region, ...], word: str
) -> None:
    worker = WorkerConnector(config, GEOMETRY, IDENTITY, lambda *_: FakeAgent())
    with pytest.raises(UnsupportedError, match=word):
        worker.register_kv_caches(memory)


def test_stock_engines_are_not_offered_blocks_of_several_kernel_blocks() -> None:
    """Nor are engines of ours from before they were named, by the field of stock's."""
    payloads = []
    for kernel_sizes in ((), (8,)):
        geometry = replace(GEOMETRY, group_kernel_sizes=kernel_sizes)
        worker = WorkerConnector(CONFIG, geometry, IDENTITY, lambda *_: FakeAgent())
        worker.register_kv_caches(regions())
        payloads.append(decode_payload(worker.get_handshake_payload()))
        worker.shutdown()
    whole, split = payloads
    assert whole.effective_hash == split.effective_hash == whole.compatibility_hash
    assert split.compatibility_hash == NOT_FOR_STOCK
    metadata = decode_metadata(split)
    assert metadata.physical_blocks_per_logical_kv_block == 2
    assert metadata.group_kernel_sizes == [8]


@pytest.mark.parametrize(
    ("config", "memory"),
    [
        (replace(CONFIG, buffer_device="cpu"), regions()),
        (replace(CONFIG, buffer_device="cuda"), VRAM),
        (replace(CONFIG, cross_layers_blocks=True), TOGETHER),
        (CONFIG, VRAM),
        (CONFIG, (replace(regions()[0], group=-1),)),
    ],
)
def test_memory_that_does_is_accepted(config: ConnectorConfig, memory: tuple[Region, ...]) -> None:
    refuse_unsupported_memory(config, GEOMETRY, memory)
