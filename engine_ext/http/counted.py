"""The names of the connector's counters in `/metrics`, the same in every engine.

Each counter has a name of ours. Counters that stock vLLM's NIXL connector has as well appear under
its names too, so that dashboards made for it work. docs/metrics.md lists all of them.
"""

from dataclasses import fields
from typing import NamedTuple

from engine_ext.common.types import ConnectorStats

PREFIX = "disagg_engine_kv_"


class CountedMetric(NamedTuple):
    field: str
    """The field of ConnectorStats."""
    name: str
    """The name of the metric. A counter's samples end in `_total`."""
    text: str
    is_gauge: bool


class Summed(NamedTuple):
    fields: tuple[str, ...]
    """Counters of ConnectorStats that are added up."""
    name: str
    text: str


class Distributed(NamedTuple):
    field: str
    name: str
    text: str
    bounds: tuple[float, ...]


COUNTED = tuple(
    CountedMetric(
        field.name,
        PREFIX + field.name,
        f"KV connector: {field.name.replace('_', ' ')}",
        "active" in field.name,
    )
    for field in fields(ConnectorStats)
    if field.type is int
)

STOCK = (
    Summed(
        ("pulls_failed", "pushes_failed", "handshakes_failed", "notifications_failed"),
        "vllm:nixl_num_failed_transfers",
        "KV transfers, handshakes and notifications that failed",
    ),
    Summed(
        ("notifications_failed",),
        "vllm:nixl_num_failed_notifications",
        "Notifications that NIXL refused to send",
    ),
    Summed(
        ("leases_expired",),
        "vllm:nixl_num_kv_expired_reqs",
        "Requests whose KV no engine read in time",
    ),
    Summed(
        ("confirmations_late",),
        "vllm:nixl_num_notifications_after_expiry",
        "Readers that confirmed after the lease had ended",
    ),
)

_NAMES = {
    "transfer_seconds": ("vllm:nixl_xfer_time_seconds", "Duration of a KV transfer"),
    "post_seconds": ("vllm:nixl_post_time_seconds", "Time to post a KV transfer"),
    "bytes_per_transfer": ("vllm:nixl_bytes_transferred", "Bytes per KV transfer"),
    "descriptors_per_transfer": ("vllm:nixl_num_descriptors", "Descriptors per KV transfer"),
    "handshake_seconds": (f"{PREFIX}handshake_seconds", "Duration of a handshake that succeeded"),
    "lease_age_at_read_seconds": (
        f"{PREFIX}lease_age_at_read_seconds",
        "Age of a lease when its last reader confirmed",
    ),
}

_NOTHING = ConnectorStats()

DISTRIBUTED = tuple(
    Distributed(field, name, text, getattr(_NOTHING, field).bounds)
    for field, (name, text) in _NAMES.items()
)
