"""The configuration of the connector: the JSON of `--kv-transfer-config`, checked once, as a frozen
value.
"""

import difflib
import logging
import math
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from engine_ext.common.access import (
    OPEN,
    Access,
    Networks,
    SharedSecret,
    parse_networks,
    read_secret,
)
from engine_ext.common.prefix_hashes import MAX_TOKENS
from engine_ext.common.step_budget import parse_target

logger = logging.getLogger(__name__)

LoadFailurePolicy = Literal["fail", "recompute"]

TransferMode = Literal["pull", "push"]

LEAST_SECONDS, MOST_SECONDS = 0.01, 1e6
"""The range of every time. Peers do not accept longer times."""

CONNECTORS: dict[str, TransferMode] = {"DisaggConnector": "pull", "DisaggPushConnector": "push"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorConfig:
    """The configuration. Times are in seconds."""

    engine_id: str
    transfer_mode: TransferMode = "pull"
    load_failure_policy: LoadFailurePolicy = "fail"
    backends: tuple[str, ...] = ("UCX",)
    num_threads: int = 0
    """Worker threads of the UCX backend. With threads, an error of a large transfer does not mean
    that it has ended, so its blocks stay in quarantine until the engine ends."""
    lease_duration: float = 30.0
    bidirectional: bool = False
    """Decode engines retain a turn's KV if asked to, and prefill engines pull it."""
    retain_seconds: float = 480.0
    """How long a turn's KV is retained for the next turn."""
    quarantine_share: float = 0.25
    """The share of the cache that may be in quarantine. Beyond it no READ begins."""
    retain_share: float = 0.5
    """The share of the cache that retained turns may hold. The oldest are evicted."""
    prefill_load_timeout: float = 1.0
    """The longest time in seconds that a prefill waits for the connection and the READ of the last
    turn's KV, plus a second per gigabyte. The source's answer may take as long again."""
    loan_timeout: float = 1.0
    """The longest time in seconds that a request waits for a loan of another engine's prefix."""
    recompute_threshold: int = 64
    """A prefill engine computes fewer tokens than this instead of pulling them from a decode
    engine."""
    trust_unproven_prefix: bool = False
    """Pull turns from a decode engine that sends no prefix hashes."""
    trust_request_ids: bool = False
    """Push to stock decode engines by `X-Request-Id`, because clients cannot choose it here."""
    global_cache_hit_threshold: float = 0.0
    """For the host's scheduler: see engine_ext.scheduler.admission."""
    hand_back: bool = False
    """For the host's scheduler: return requests that do not choose instead of preempting them."""
    target_itl_ms: float | None = None
    """For the host's scheduler: see engine_ext.common.step_budget."""
    enforce_handshake_compat: bool = True
    permute_layout: bool = False
    """Read and write peers whose blocks have heads and tokens in the other order."""
    cross_layers_blocks: bool = False
    """Require that the host lays out all layers of a block together."""
    buffer_device: Literal["cpu", "cuda"] | None = None
    """The memory that NIXL reads and writes; None for the memory of the KV cache. "cpu" asks for
    host buffers if the cache is on a GPU. "cuda" is refused if the cache is in host memory."""
    handshake_timeout: float = 5.0
    registration_timeout: float | None = None
    """How long D waits for P's WRITE. None: as long as `retain_seconds`."""
    writes_early: bool = True
    """P in push mode writes the computed part of a prompt while it computes the rest."""
    write_bound: float = 1200.0
    """A promise of P: the longest time from the begin of a WRITE until it has landed or never will,
    even if P's machine is gone. RDMA gives up within seconds. TCP gives up after 15 minutes
    (`net.ipv4.tcp_retries2`) and sends its data until then."""
    landing_seconds: float = 120.0
    """How long data of a failed WRITE may still arrive (`net.ipv4.tcp_orphan_retries`)."""
    transfer_timeout: float = 120.0
    """The timeout of one READ or WRITE."""
    confirm_timeout: float = 2.0
    """The timeout of the source's answer to a READ."""
    revoke_grace: float = 0.5
    """How long the blocks of a revoked lease stay for a READ in progress."""
    checksums: bool = False
    """Make a checksum of each leased block, and compare READs with the source's checksums."""
    engine_ttl: float = 3600.0
    """An engine that was not used for so long is forgotten."""
    access: Access = OPEN
    """The shared secret and the allowed peers of the side channel."""

    @property
    def heartbeat_interval(self) -> float:
        """A sixth of the lease, in whole seconds if the lease is long enough."""
        return float(self.lease_duration // 6) or self.lease_duration / 6

    @property
    def lease_extension(self) -> float:
        """Two thirds of the lease: for so long a heartbeat extends it, from its arrival."""
        return float(self.lease_duration * 2 // 3) or self.lease_duration * 2 / 3

    @property
    def unused_ttl(self) -> float:
        """At least two leases, because only heartbeats may show that an engine is in use."""
        return max(self.engine_ttl, 2 * self.lease_duration)

    @property
    def push_deadline(self) -> float:
        return self.registration_timeout or self.retain_seconds

    @classmethod
    def from_kv_transfer_config(cls, raw: Mapping[str, Any]) -> "ConnectorConfig":
        """Read vLLM's JSON. Raises ValueError with a one-line message."""
        if not isinstance(raw, Mapping):
            raise ValueError("kv-transfer-config is not a JSON object")
        _warn_unknown(raw, (*_TOP_LEVEL, "kv_connector_extra_config"), "kv-transfer-config")
        given = {"engine_id": str(uuid.uuid4()), **_read(raw, _TOP_LEVEL)}
        if "transfer_mode" not in given:
            raise ValueError("kv-transfer-config: kv_connector is missing")
        if (extra := raw.get("kv_connector_extra_config")) is not None:
            if not isinstance(extra, Mapping):
                raise ValueError("kv_connector_extra_config is not a JSON object")
            _warn_unknown(extra, tuple(_EXTRA), "kv_connector_extra_config")
            given |= _read(extra, _EXTRA)
        access = _access(*(given.pop(name, None) for name in ("secret", "secret_mode", "peers")))
        return cls(**given, access=access)


def _read(raw: Mapping[str, Any], table: Mapping[str, tuple[str, "Check"]]) -> dict[str, Any]:
    """Return the values by field."""
    found = {field: check(key, raw[key]) for key, (field, check) in table.items() if key in raw}
    found.pop(NOT_OURS, None)
    return found


def _access(secret: SharedSecret | None, mode: str | None, peers: Networks | None) -> Access:
    if mode is not None and secret is None:
        raise ValueError(f"side_channel_mode: {mode} needs a side_channel_secret_file")
    return Access(secret, mode == "mixed", peers or OPEN.peers)


def _warn_unknown(raw: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in raw:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            logger.warning("%s: unknown key %r is ignored%s", where, key, hint)


Check = Callable[[str, Any], Any]


def _one_of(*allowed: str) -> Check:
    def check(key: str, value: Any) -> Any:
        if value not in allowed:
            raise ValueError(f"{key}: {value!r} is not one of {', '.join(allowed)}")
        return value

    return check


def _connector(key: str, value: Any) -> TransferMode:
    return CONNECTORS[_one_of(*CONNECTORS)(key, value)]


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value or not value.isascii() or not value.isprintable():
        raise ValueError(f"{key}: {value!r} is not a printable ASCII string")
    return value


def _switch(key: str, value: Any) -> bool:
    """Accept strings as well: vLLM's documentation writes some of these as "True"."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ValueError(f"{key}: {value!r} is not true or false")


def _seconds(key: str, value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not LEAST_SECONDS <= value <= MOST_SECONDS:
        raise ValueError(
            f"{key}: {value!r:.40} is not a number of seconds "
            f"from {LEAST_SECONDS} to {MOST_SECONDS:.0f}"
        )
    return float(value)


def _seconds_or_never(key: str, value: Any) -> float:
    """Return the seconds. As in stock, zero or less means never."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return math.inf if number and value <= 0 else _seconds(key, value)


def _share(key: str, value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= 1:
        raise ValueError(f"{key}: {value!r} is not a number from 0 to 1")
    return float(value)


def _count(most: int) -> Check:
    def check(key: str, value: Any) -> int:
        if type(value) is not int or not 0 <= value <= most:
            raise ValueError(f"{key}: {value!r:.40} is not an integer from 0 to {most}")
        return value

    return check


def _names(key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        raise ValueError(f"{key}: {value!r} is not a list of backend names")
    return tuple(value)


NOT_OURS = ""
"""The field of vLLM's keys, which are only checked."""

_TOP_LEVEL: dict[str, tuple[str, Check]] = {
    "kv_connector": ("transfer_mode", _connector),
    "kv_connector_module_path": (NOT_OURS, _text),
    "kv_role": (NOT_OURS, _one_of("kv_producer", "kv_consumer", "kv_both")),
    "kv_buffer_device": ("buffer_device", _one_of("cpu", "cuda")),
    "kv_load_failure_policy": ("load_failure_policy", _one_of("fail", "recompute")),
    "engine_id": ("engine_id", _text),
    "enable_permute_local_kv": ("permute_layout", _switch),
}
"""By key, the field of `ConnectorConfig` and the check of its value."""

_EXTRA: dict[str, tuple[str, Check]] = {
    "backends": ("backends", _names),
    "num_threads": ("num_threads", _count(256)),
    "kv_lease_duration": ("lease_duration", _seconds),
    "enforce_handshake_compat": ("enforce_handshake_compat", _switch),
    "bidirectional_kv_xfer": ("bidirectional", _switch),
    "decoder_kv_blocks_ttl": ("retain_seconds", _seconds),
    "retained_blocks_share": ("retain_share", _share),
    "prefill_load_timeout": ("prefill_load_timeout", _seconds),
    "loan_timeout": ("loan_timeout", _seconds),
    "kv_recompute_threshold": ("recompute_threshold", _count(MAX_TOKENS)),
    "trust_unproven_prefix": ("trust_unproven_prefix", _switch),
    "trust_request_ids": ("trust_request_ids", _switch),
    # Read by the scheduler class; checked here so that a typo is found at start.
    "global_cache_hit_threshold": ("global_cache_hit_threshold", _share),
    "hand_back": ("hand_back", _switch),
    "target_itl_ms": ("target_itl_ms", lambda _, value: parse_target(value)),
    "enable_cross_layers_blocks": ("cross_layers_blocks", _switch),
    "push_registration_timeout": ("registration_timeout", _seconds),
    "push_while_computing": ("writes_early", _switch),
    "push_write_bound": ("write_bound", _seconds),
    "side_channel_secret_file": ("secret", read_secret),
    "side_channel_mode": ("secret_mode", _one_of("required", "mixed")),
    "allowed_peers": ("peers", parse_networks),
    "kv_checksum": ("checksums", _switch),
    "engine_ttl": ("engine_ttl", _seconds_or_never),
}
"""The same. `_access` makes one field of three keys."""
