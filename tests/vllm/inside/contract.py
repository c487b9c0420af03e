"""Runs with one release of vLLM: `python -m tests.vllm.inside.contract RESULTS`.

Writes one JSON object: the versions of vLLM and of its protocol, the features that are off with the
reason, and for each case its traceback where it fails: most are of bytes that we and vLLM both
write and must read alike.
"""

import ast
import importlib
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import vllm
from vllm import __version__

from engine_ext.scheduler.admission import FINISH_REASON
from engine_ext.vllm import __file__ as connector_file
from engine_ext.vllm import describe
from engine_ext.vllm.compat import support
from engine_ext.vllm.compat.support import OPTIONAL
from engine_ext.vllm.compat.vllm_symbols import REQUIRED
from engine_ext.vllm.optional.answers import patch_outputs
from engine_ext.vllm.optional.answers.early_ends import MARK
from engine_ext.wire.handshake import GET_METADATA, AgentMetadata, HandshakePayload
from engine_ext.wire.notifications import REGISTRATION_PREFIX
from tests.vllm.inside import stock_notifications

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

NEWER = {"unregister_kv_caches"}
"""What we override and 0.32 does not have, nor need."""


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
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    sent = EngineCoreOutput("r", [], finish_reason=FinishReason.ABORT, stop_reason=f"{MARK}why")
    got = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=EngineCoreOutput)
    assert patch_outputs.translated(got.finish_reason, got.stop_reason) == (FINISH_REASON, "why")
    plain = FinishReason.STOP, f"{MARK}why"
    assert patch_outputs.translated(*plain) == plain


def every_name_that_we_import_is_there() -> None:
    """In a release that lacks nothing; in another, the features' reasons name the first one."""
    if support.missing():
        return
    missing = {
        f"{node.module}.{one.name}"
        for path in Path(connector_file).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "vllm"
        for one in node.names
        if not is_importable(str(node.module), one.name)
    }
    assert missing == set()


def is_importable(module: str, name: str) -> bool:
    try:
        found = importlib.import_module(module)
        return hasattr(found, name) or bool(importlib.import_module(f"{module}.{name}"))
    except ImportError:
        return False


def nothing_of_our_connectors_is_left_abstract() -> None:
    from engine_ext.vllm.connector import DisaggConnector, DisaggPushConnector

    for cls in (DisaggConnector, DisaggPushConnector):
        assert set(cls.__abstractmethods__) == set()


def what_we_override_is_probed() -> None:
    from engine_ext.vllm import connector, metrics, scheduler, worker_reports
    from engine_ext.vllm.optional.answers import resume
    from engine_ext.vllm.optional.streams import patch_streams

    classes = (
        connector.DisaggConnector,
        worker_reports.WorkerReport,
        resume.ResumedPrefillStats,
        scheduler.DisaggAsyncScheduler,
        scheduler.DisaggScheduler,
        metrics.DisaggPromMetrics,
        metrics.DisaggStats,
        patch_streams.ReplayedOutput,
    )
    lacking = {cls.__name__: {*_overrides(cls)} - {*_probed(cls)} for cls in classes}
    assert not any(lacking.values()), lacking


def _overrides(cls: type) -> Iterator[str]:
    """Of vLLM's, by our classes."""
    for ours in cls.__mro__:
        if ours.__module__.startswith("engine_ext."):
            yield from (name for name in vars(ours) if name in _theirs(cls))


def where_vllm_asks_for_a_connectors_name_is_known() -> None:
    """Outside its connectors. docs/engine-configuration.md says what that is to our name."""
    root = Path(str(vllm.__file__)).parent
    found = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if '"NixlConnector"' in path.read_text(encoding="utf-8")
    }
    asking = {name for name in found if not name.startswith("distributed/kv_transfer/")}
    expected = {"config/vllm.py", "platforms/cpu.py"}
    if __version__.startswith("0.33."):
        expected.add("models/step5/nvidia/model.py")
    assert asking == expected


def _theirs(cls: type) -> set[str]:
    names = {name for each in cls.__mro__ if _is_theirs(each) for name in vars(each)}
    return {name for name in names - NEWER if not name.startswith(("__", "_abc_"))}


def _probed(cls: type) -> Iterator[str]:
    """Of vLLM's that it derives from."""
    theirs = {f"{each.__module__}:{each.__qualname__}" for each in filter(_is_theirs, cls.__mro__)}
    for name in (name for feature in REQUIRED + OPTIONAL for name in feature.symbols):
        owner, _, attribute = name.at.rpartition(".")
        if name.at in theirs:
            yield from name.has.split()
        elif owner in theirs:
            yield attribute


def _is_theirs(cls: type) -> bool:
    return cls.__module__.startswith("vllm.")


def run(case: Callable[[], None]) -> str | None:
    try:
        case()
    except Exception:
        return traceback.format_exc()
    return None


if __name__ == "__main__":
    cases = (
        a_handshake_is_read_alike,
        *stock_notifications.CASES,
        our_finish_reason_passes_between_vllms_processes,
        every_name_that_we_import_is_there,
        nothing_of_our_connectors_is_left_abstract,
        what_we_override_is_probed,
        where_vllm_asks_for_a_connectors_name_is_known,
    )
    required = {each.name: support.reason(each) for each in REQUIRED}
    results = {
        "version": __version__,
        "protocol": describe.stock_version().get("connector"),
        "refused": {name: why for name, why in required.items() if why},
        "missing": support.missing(),
        "cases": {case.__name__: run(case) for case in cases},
    }
    Path(sys.argv[1]).write_text(json.dumps(results))
