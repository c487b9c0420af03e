"""What the connector cannot transfer: the engine refuses to start and names the reason. What it
cannot transfer from or to a certain peer is refused at the handshake (layout/match.py).
"""

from collections.abc import Sequence

from engine_ext.common.config import ConnectorConfig
from engine_ext.common.types import SHARED, CacheGeometry, EngineIdentity, Region


class UnsupportedError(ValueError):
    """The engine cannot start in this configuration. The message is one line with the reason."""


def refuse_unsupported(
    config: ConnectorConfig, geometry: CacheGeometry, identity: EngineIdentity
) -> None:
    """Raises UnsupportedError for a model or a parallelism whose KV we cannot move."""
    unsupported = _first(
        ("host buffers with layers that keep a state", geometry.has_state and geometry.is_staged),
        (
            "host buffers with blocks of several sizes",
            geometry.is_staged and len({*geometry.block_sizes}) > 1,
        ),
        (f"decode context parallel size {identity.dcp_size}", identity.dcp_size != 1),
        (f"prefill context parallel size {identity.pcp_size}", identity.pcp_size != 1),
        ("kv_checksum in push mode", config.checksums and config.transfer_mode == "push"),
    )
    if unsupported is not None:
        raise UnsupportedError(f"{unsupported}: not supported by this connector")


def refuse_unsupported_memory(
    config: ConnectorConfig, geometry: CacheGeometry, regions: Sequence[Region]
) -> None:
    """Raises UnsupportedError if configuration or geometry do not match this memory."""
    for region in regions:
        if not SHARED <= region.group < len(geometry.group_windows):
            raise UnsupportedError(f"region {region.name} is of no KV-cache group")
    in_host = {region.mem_type == "DRAM" for region in regions}
    asked = config.buffer_device
    if asked == "cpu" and False in in_host:
        raise UnsupportedError(
            "kv_buffer_device cpu: this engine does not stage its KV in host memory"
        )
    if asked == "cuda" and True in in_host:
        raise UnsupportedError("kv_buffer_device cuda: this engine's KV is in host memory")
    if config.cross_layers_blocks and not any(len(region.layers) > 1 for region in regions):
        raise UnsupportedError(
            "enable_cross_layers_blocks: this engine lays out its KV layer by layer"
        )


def _first(*facts: tuple[str, bool]) -> str | None:
    return next((name for name, is_so in facts if is_so), None)
