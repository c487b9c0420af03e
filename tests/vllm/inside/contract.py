"""Runs with one release of vLLM: `python -m tests.vllm.inside.contract RESULTS`.

Writes one JSON object: vLLM's version, the features that are off with the reason, and for each of
the bytes that we and vLLM both write, the traceback where we do not read alike.
"""

import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from vllm import __version__

from engine_ext.core.admission import FINISH_REASON
from engine_ext.vllm.compat import finish_reason, support
from engine_ext.vllm.compat.features import REQUIRED
from engine_ext.wire.handshake import GET_METADATA, AgentMetadata, HandshakePayload
from engine_ext.wire.notifications import REGISTRATION_PREFIX

MEMORY: dict[str, Any] = {
    "engine_id": "e",
    "agent_metadata": b"\x00\xff",
    "kv_caches_base_addr": [1 << 47],
    "device_id": 0,
    "num_blocks": 3,
    "block_lens": [64],
    "block_strides": [128],
    "kv_cache_layout": "LBHNC",
    "block_size": 16,
    "ssm_sizes": (0, 0),
    "attn_backend_name": "CPU_ATTN",
    "physical_blocks_per_logical_kv_block": 1,
    "region_num_blocks": [3],
    "region_group_ids": [-1],
    "region_names": ["model.layers.0.self_attn.attn"],
    "region_mem_types": ["DRAM"],
}


def a_handshake_is_read_alike() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import metadata as stock

    theirs = stock.NixlAgentMetadata(**MEMORY)
    ours = msgspec.msgpack.decode(msgspec.msgpack.encode(theirs), type=AgentMetadata)
    assert {name: getattr(ours, name) for name in MEMORY} == MEMORY
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(ours), type=stock.NixlAgentMetadata)
    assert asdict(again) == asdict(theirs)
    answer = stock.NixlHandshakePayload("hash", b"inner")
    payload = msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=HandshakePayload)
    assert (payload.compatibility_hash, payload.agent_metadata_bytes) == ("hash", b"inner")
    assert stock.GET_META_MSG == GET_METADATA
    assert stock.PUSH_REG_NOTIF_PREFIX == REGISTRATION_PREFIX


def our_finish_reason_passes_between_vllms_processes() -> None:
    from vllm.v1.engine import FINISH_REASON_STRINGS, EngineCoreOutput, FinishReason

    assert sorted(FinishReason) == list(range(len(FINISH_REASON_STRINGS)))
    finish_reason.install()
    said = EngineCoreOutput("r", [], finish_reason=finish_reason.cache_threshold_reason())
    heard = msgspec.msgpack.decode(msgspec.msgpack.encode(said), type=EngineCoreOutput)
    assert str(heard.finish_reason) == FINISH_REASON
    assert heard.finish_reason is said.finish_reason


def run(case: Callable[[], None]) -> str | None:
    try:
        case()
    except Exception:
        return traceback.format_exc()
    return None


if __name__ == "__main__":
    cases = (a_handshake_is_read_alike, our_finish_reason_passes_between_vllms_processes)
    required = {each.name: support.reason(each) for each in REQUIRED}
    results = {
        "version": __version__,
        "refused": {name: why for name, why in required.items() if why},
        "missing": support.missing(),
        "bytes": {case.__name__: run(case) for case in cases},
    }
    Path(sys.argv[1]).write_text(json.dumps(results))
