"""`GET /disagg/identity`: the facts that routers and other engines need about an engine.

For each data-parallel rank, the page asks the rank itself by the handshake that other engines use.
So the page shows exactly what they get.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from engine_ext.common.access import EVERYWHERE, OPEN, Access
from engine_ext.common.config import ConnectorConfig
from engine_ext.common.types import PeerAddress
from engine_ext.wire.dialer import PeerRank, TcpDialer
from engine_ext.wire.errors import CONNECTOR_VERSION, EXTENSION_VERSION, WireError
from engine_ext.wire.handshake import HandshakePayload, decode_metadata

PATH = "/disagg/identity"
ANSWER_SECONDS = 2.0
POLL_SECONDS = 0.005
KNOWN_TO_SOME = ("loan_scheme", "loan_problem", "max_step_tokens", "max_num_seqs", "target_itl_ms")
"""Facts about a rank that are left out where the host does not know them."""


class IdentityError(Exception):
    """A rank does not answer. The message names it."""


class SideChannel(NamedTuple):
    """The address where a data-parallel rank answers handshakes."""

    dp_rank: int
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """What the host knows without asking its ranks."""

    name: str
    side_channels: Sequence[SideChannel] = ()
    """Those of the ranks behind this HTTP server. Without a connector there are none."""
    transfer_modes: Sequence[str] = ()
    capabilities: Sequence[str] = ()
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    versions: Mapping[str, str]
    """Versions of the host."""
    renders: Mapping[str, str] = field(default_factory=dict)
    """Short hashes of what two engines must share to give token ids the same meaning and to render
    messages alike: `model`, `tokenizer`, `chat_template`."""
    features: Sequence[str] = ()
    """Our features that the host's version supports, if that depends on the version."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Features that it does not support, and the reasons."""
    access: Access = OPEN
    """Access to the side channels, which the page asks as another engine would."""
    lease_seconds: float | None = None
    """The connector's `kv_lease_duration`: other engines have to renew leases in time."""
    factors: Mapping[str, str] = field(default_factory=dict)
    """Further `compatibility_factors`; those of the side channels count first."""
    max_step_tokens: int | None = None
    """The most prompt tokens that a step computes beside decoding requests."""
    max_num_seqs: int | None = None
    """The most requests that a rank runs at once."""
    lends: bool = False
    """It lends prefixes of its cache to engines that ask (engine_ext/scheduler/loans.py)."""
    loan_problem: str | None = None
    """Why it does not lend, and does not borrow either if `borrows` is False."""
    loan_scheme: str | None = None
    """How it names the blocks of its cache: loans need equal names (`PrefixCache.scheme`)."""
    borrows: bool = False
    """It asks the `holders` of a request for loans (engine_ext/scheduler/loans.py)."""
    target_itl_ms: float | None = None
    """A step that decodes ends within 0.9 of it if possible: see common/step_budget.py."""
    step_models: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """The fitted step models, by rank: see common/step_costs.py."""


def capabilities_of(config: ConnectorConfig | None) -> tuple[str, ...]:
    """Return the capabilities that the connector adds to any host, or () without a connector."""
    if config is None:
        return ()
    turns = ("turns",) if config.bidirectional else ()
    return ("prefix_proof", "acknowledged_leases", "release", *turns)


def identity(engine: EngineDescription) -> dict[str, Any]:
    """Return the page as JSON. Blocks until the ranks have answered, at most ANSWER_SECONDS.

    Raises IdentityError.
    """
    return {
        "engine": engine.name,
        "versions": {
            "disagg_router": installed_version("disagg-router"),
            "nixl": installed_version("nixl"),
            "connector": str(CONNECTOR_VERSION),
            "extension": str(EXTENSION_VERSION),
            **engine.versions,
        },
        "capabilities": list(engine.capabilities),
        **({"renders": dict(engine.renders)} if engine.renders else {}),
        **_fitting(engine),
        "transfer_modes": list(engine.transfer_modes),
        "tp_size": engine.tp_size,
        "pp_size": engine.pp_size,
        "dp_size": engine.dp_size,
        **_connecting(engine),
        "ranks": _ranks(engine),
    }


def _connecting(engine: EngineDescription) -> dict[str, Any]:
    """Return what engines must have in common besides their ranks."""
    if not engine.side_channels:
        return {}
    access, lease = engine.access, engine.lease_seconds
    secret = "mixed" if access.is_mixed else "required"
    return {
        "side_channel_secret": "none" if access.secret is None else secret,
        **({} if lease is None else {"lease_seconds": lease}),
    }


def _fitting(engine: EngineDescription) -> dict[str, Any]:
    if not engine.features:
        return {}
    return {"features": list(engine.features), "missing": dict(engine.missing)}


def installed_version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown"


def _ranks(engine: EngineDescription) -> list[dict[str, Any]]:
    dialer = TcpDialer(access=replace(engine.access, peers=EVERYWHERE))
    deadline = time.monotonic() + ANSWER_SECONDS
    try:
        return [_rank(engine, each, dialer, deadline) for each in engine.side_channels]
    except WireError as error:
        raise IdentityError(f"handshake with this engine's own side channel: {error}") from None


def _rank(
    engine: EngineDescription, at: SideChannel, dialer: TcpDialer, deadline: float
) -> dict[str, Any]:
    """Return the facts about a rank, under the names of `kv_transfer_params` if they have one."""
    payload = _shake_hands(at, dialer, deadline)
    metadata = decode_metadata(payload)
    return {
        "dp_rank": at.dp_rank,
        "remote_engine_id": metadata.engine_id,
        "remote_host": at.host,
        "remote_port": at.port,
        "tp_size": engine.tp_size,
        "pp_size": engine.pp_size,
        "compatibility_hash": payload.effective_hash,
        "compatibility_factors": {**engine.factors, **(payload.compat_factors or {})},
        "block_size": metadata.block_size,
        "num_blocks": metadata.num_blocks,
        "kv_cache_layout": metadata.kv_cache_layout,
        "attn_backend": metadata.attn_backend_name,
        "lends": engine.lends,
        "borrows": engine.borrows,
        **{name: value for name in KNOWN_TO_SOME if (value := getattr(engine, name)) is not None},
        **({"step_model": dict(model)} if (model := engine.step_models.get(at.dp_rank)) else {}),
    }


def _shake_hands(at: SideChannel, dialer: TcpDialer, deadline: float) -> HandshakePayload:
    handshake = dialer.dial(PeerRank(PeerAddress("self", at.host, at.port), 0))
    try:
        while (payload := handshake.receive()) is None:
            if time.monotonic() >= deadline:
                raise IdentityError(f"no answer on the side channel {at.host}:{at.port}")
            time.sleep(POLL_SECONDS)
        return payload
    finally:
        handshake.close()
