"""The handshake's bytes, those of vLLM 0.32's NixlConnector (connector version 14).

The reader sends msgpack `(b"get_meta_msg", pp_rank, tp_rank)`; the listener answers two frames, a
`HandshakePayload` and its perf_counter. `disagg_ext` in the inner map says that an engine runs this
extension. What is said where engines share a secret is in secret_handshake.py. Peers are untrusted:
decoding raises `WireError` and nothing else.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from engine_ext.wire.errors import MALFORMED, Duration, Rank, Unsigned, WireError

GET_METADATA = b"get_meta_msg"
PROVEN_METADATA = b"disagg_meta_msg"


class Proof(NamedTuple):
    """The dialer holds the secret: `mac` is over the listener's challenge and its own nonce."""

    challenge: bytes
    nonce: bytes
    mac: bytes


class Question(NamedTuple):
    """Stock asks without a proof."""

    rank: Rank
    proof: Proof | None = None


class RefusedError(WireError):
    """The listener's own words; `challenge`: it will answer who proves to hold the secret."""

    def __init__(self, reason: str, challenge: bytes | None) -> None:
        super().__init__(f"handshake refused by the peer: {reason}")
        self.challenge = challenge


class AgentMetadata(msgspec.Struct, kw_only=True):
    """One worker's memory, as the reader needs it. Field names are stock's, so are the defaults.

    Lists have one entry per region. `block_lens` and `block_strides` are bytes.
    """

    engine_id: str
    agent_metadata: bytes
    kv_caches_base_addr: list[Unsigned]
    device_id: Unsigned
    num_blocks: Unsigned
    block_lens: list[Unsigned]
    block_strides: list[Unsigned]
    kv_cache_layout: str
    block_size: Unsigned
    ssm_sizes: tuple[int, int] = (0, 0)
    attn_backend_name: str
    physical_blocks_per_logical_kv_block: int = 1
    region_num_blocks: list[Unsigned] | None = None
    region_group_ids: list[int] | None = None
    region_names: list[str] | None = None
    region_mem_types: list[str] | None = None
    dcp_size: int = 1
    pcp_size: int = 1
    ple_block_len: int | None = None
    region_members: list[list[Any]] = msgspec.field(default_factory=list)
    packed_member_layouts: dict[Any, Any] = msgspec.field(default_factory=dict)
    disagg_ext: int | None = None
    """Version of our extension; stock neither sends nor reads it."""
    lease_extension: Duration = 0.0
    """Seconds that one heartbeat grants here from its arrival."""
    write_bound: Duration = 0.0
    """Seconds after which a WRITE that has begun here has landed, or never will."""
    tensor_rank: tuple[int, int] | None = None
    """This worker's, and how many there are; stock neither sends nor reads it."""
    block_layers: list[list[str]] | None = None
    """Per region, the layers that one block holds, in their order; stock neither sends nor reads
    it. Stock's `region_members` are layers that share the memory."""


_PER_REGION = (
    "block_lens",
    "block_strides",
    "region_num_blocks",
    "region_group_ids",
    "block_layers",
    "region_names",
    "region_mem_types",
)


class HandshakePayload(msgspec.Struct, kw_only=True):
    """The outer map. Stock ignores the keys it does not know, so ours may carry more.

    `compat_factors` lets the reader name the field that differs, not just the hash.
    """

    compatibility_hash: str
    agent_metadata_bytes: bytes
    compat_factors: dict[str, str] | None = None
    error: str | None = None
    challenge: bytes | None = None
    """The listener knows more to say to who proves to hold the secret (mixed mode)."""


def compatibility_hash(factors: Mapping[str, str]) -> str:
    """sha256, hex, over the factors in canonical form."""
    canonical = json.dumps(dict(factors), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def encode_request(rank: Rank, proof: Proof | None = None) -> bytes:
    """The first request must be stock's to the byte: a stock listener dies of any other."""
    if proof is None:
        return msgspec.msgpack.encode((GET_METADATA, *rank))
    return msgspec.msgpack.encode((PROVEN_METADATA, *rank, *proof))


def decode_request(message: bytes) -> Question:
    try:
        match msgspec.msgpack.decode(message, type=list[bytes | int]):
            case [name, int(pp), int(tp)] if name == GET_METADATA:
                return Question((pp, tp))
            case [name, int(pp), int(tp), bytes(challenge), bytes(nonce), bytes(mac)] if (
                name == PROVEN_METADATA
            ):
                return Question((pp, tp), Proof(challenge, nonce, mac))
            case other:
                raise WireError(f"handshake request: unknown message {other!r:.64}")
    except MALFORMED as error:
        raise WireError(f"handshake request: {error}") from None


def encode_payload(
    metadata: AgentMetadata, factors: Mapping[str, str], compat_hash: str | None = None
) -> bytes:
    return msgspec.msgpack.encode(
        HandshakePayload(
            compatibility_hash=compat_hash or compatibility_hash(factors),
            agent_metadata_bytes=msgspec.msgpack.encode(metadata),
            compat_factors=dict(factors),
        )
    )


def encode_refusal(reason: str, challenge: bytes | None = None) -> bytes:
    """Decodes on our side as an error, and fails to decode at once on stock's."""
    more = {} if challenge is None else {"challenge": challenge}
    return msgspec.msgpack.encode({"error": reason, **more})


def decode_payload(message: bytes) -> HandshakePayload:
    """Raises RefusedError for what `encode_refusal` made, WireError for all else."""
    try:
        answer = msgspec.msgpack.decode(message, type=dict[str, Any])
        if answer.get("error") is None:
            return msgspec.msgpack.decode(message, type=HandshakePayload)
    except MALFORMED as error:
        raise WireError(f"handshake reply: {error}") from None
    challenge = answer.get("challenge")
    raise RefusedError(
        str(answer["error"])[:500], challenge if isinstance(challenge, bytes) else None
    )


def as_stock(payload: HandshakePayload) -> HandshakePayload:
    """The same engine without our extension. Raises WireError."""
    metadata = msgspec.structs.replace(decode_metadata(payload), disagg_ext=None)
    inner = msgspec.msgpack.encode(metadata)
    return msgspec.structs.replace(payload, agent_metadata_bytes=inner)


def decode_metadata(payload: HandshakePayload) -> AgentMetadata:
    try:
        metadata = msgspec.msgpack.decode(payload.agent_metadata_bytes, type=AgentMetadata)
    except MALFORMED as error:
        raise WireError(f"agent metadata: {error}") from None
    regions = len(metadata.kv_caches_base_addr)
    for name in _PER_REGION:
        values = getattr(metadata, name)
        if values is not None and len(values) != regions:
            raise WireError(f"agent metadata: {len(values)} {name} for {regions} regions")
    return metadata
