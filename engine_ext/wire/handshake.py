"""The messages of the handshake: those of vLLM 0.32's NixlConnector (connector version 14).

The reader sends msgpack `(b"get_meta_msg", pp_rank, tp_rank)`. The listener answers two frames: a
`HandshakePayload` and its perf_counter. The field `disagg_ext` in the inner map shows that an
engine runs this extension. Engines that share a secret add the messages of `secret_handshake`.
Peers are untrusted: decoding raises `WireError` and nothing else.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from engine_ext.common.types import CONFIGURATION
from engine_ext.wire.errors import MALFORMED, Duration, Rank, Unsigned, WireError

GET_METADATA = b"get_meta_msg"
PROVEN_METADATA = b"disagg_meta_msg"

MAX_REPLY_BYTES = 1 << 20
"""An answer takes about 175 bytes per region: 45 kB for 128 layers with separate K and V, 177 kB
for 1,024 regions (measured with UCX over TCP). With several network cards NIXL's keys are longer,
by some hundred bytes per region."""
MAX_REFUSAL_BYTES = 4096
MAX_REGIONS = 4096
MAX_LAYERS = 4096
MAX_FACTORS = 64
MAX_SECTIONS = 256

T = TypeVar("T")

Text = Annotated[str, msgspec.Meta(max_length=1024)]
Numbers = Annotated[list[Unsigned], msgspec.Meta(max_length=MAX_REGIONS)]
Texts = Annotated[list[Text], msgspec.Meta(max_length=MAX_REGIONS)]
Layers = Annotated[list[Text], msgspec.Meta(min_length=1, max_length=MAX_LAYERS)]
Sections = Annotated[list[tuple[Unsigned, Unsigned]], msgspec.Meta(max_length=MAX_SECTIONS)]
Challenge = Annotated[bytes, msgspec.Meta(max_length=256)]
"""It is sent back in the next request, which is bounded as well."""

NOTHING_LISTED, NOTHING_MAPPED = msgspec.Raw(b"\x90"), msgspec.Raw(b"\x80")


class Proof(NamedTuple):
    """Shows that the dialer holds the secret: `mac` is over the listener's challenge and the
    dialer's nonce."""

    challenge: bytes
    nonce: bytes
    mac: bytes


class HandshakeRequest(NamedTuple):
    """A request. Stock engines send no proof."""

    rank: Rank
    proof: Proof | None = None


class HandshakeRefusedError(WireError):
    """The listener refused. With a `challenge` it answers a dialer that proves to hold the
    secret."""

    def __init__(self, reason: str, challenge: bytes | None) -> None:
        super().__init__(f"handshake refused by the peer: {reason}")
        self.challenge = challenge


class AgentMetadata(msgspec.Struct, kw_only=True):
    """One worker's memory, for readers. Field names and defaults are those of stock vLLM.

    Lists have one entry per region. `block_lens` and `block_strides` are bytes.
    """

    engine_id: Text
    agent_metadata: bytes
    kv_caches_base_addr: Numbers
    device_id: Unsigned
    num_blocks: Unsigned
    block_lens: Numbers
    block_strides: Numbers
    kv_cache_layout: Text
    block_size: Unsigned
    ssm_sizes: tuple[int, int] = (0, 0)
    attn_backend_name: Text
    physical_blocks_per_logical_kv_block: int = 1
    region_num_blocks: Numbers | None = None
    region_group_ids: Annotated[list[int], msgspec.Meta(max_length=MAX_REGIONS)] | None = None
    region_names: Texts | None = None
    region_mem_types: Texts | None = None
    dcp_size: int = 1
    pcp_size: int = 1
    ple_block_len: int | None = None
    region_members: msgspec.Raw = NOTHING_LISTED
    """`list[list[str]]`. Stock reads it and we do not, so it is passed on unread."""
    packed_member_layouts: msgspec.Raw = NOTHING_MAPPED
    """`dict[str, tuple[int, int]]`. It is passed on unread as well."""
    disagg_ext: int | None = None
    """Version of our extension. Stock neither sends nor reads it, nor the fields below."""
    lease_extension: Duration = 0.0
    """Seconds for which one heartbeat extends a lease of this engine, from its arrival."""
    write_bound: Duration = 0.0
    """Seconds after its begin in which a WRITE of this engine has landed, or never will."""
    returns_blocks: bool = False
    """In push mode, as P, the engine answers `AwaitPrompt` and `ReturnBlocks`."""
    tensor_rank: tuple[int, int] | None = None
    """The worker's tensor rank, and the number of tensor ranks."""
    block_layers: Annotated[list[Layers], msgspec.Meta(max_length=MAX_REGIONS)] | None = None
    """Per region, the layers that one block holds, in their order. Stock's `region_members`, in
    contrast, are layers that share the memory."""
    region_tenants: Annotated[list[Texts], msgspec.Meta(max_length=MAX_REGIONS)] | None = None
    """Per region and group, the layers that share the memory."""
    group_block_sizes: Numbers | None = None
    """Per KV-cache group, the tokens of a block, if groups differ."""
    group_kernel_sizes: Numbers | None = None
    """Per KV-cache group, the tokens of a kernel's block, if a block is several of these."""
    state_sections: Sections | None = None
    """The parts of a state's block, as `StateSection`, if they are known."""


_PER_REGION = (
    "block_lens",
    "block_strides",
    "region_num_blocks",
    "region_group_ids",
    "block_layers",
    "region_tenants",
    "region_names",
    "region_mem_types",
)


NOT_FOR_STOCK = (
    "several pipeline stages, or kernel blocks in a block: for engines with DisaggConnector"
)
"""Takes the place of the hash. Stock engines log it."""


class HandshakePayload(msgspec.Struct, kw_only=True):
    """The outer map. Stock ignores unknown keys, so ours has more.

    `compat_factors` lets the reader report the field that differs, and not only the hash.
    """

    compatibility_hash: Text
    agent_metadata_bytes: bytes
    compat_factors: Annotated[dict[Text, Text], msgspec.Meta(max_length=MAX_FACTORS)] | None = None
    challenge: Challenge | None = None
    """In mixed mode: a dialer that proves to hold the secret gets a fuller payload."""
    hash_among_ours: Text | None = None
    """The hash for our engines, if `compatibility_hash` is `NOT_FOR_STOCK`."""

    @property
    def effective_hash(self) -> str:
        """The hash that is equal for engines that can exchange KV."""
        return self.hash_among_ours or self.compatibility_hash


class _Preface(msgspec.Struct):
    """The part of an answer that is read before the listener has proven itself."""

    error: str | None = None
    challenge: Challenge | None = None


def compatibility_hash(factors: Mapping[str, str]) -> str:
    """Return the SHA-256 of the factors in canonical form, in hex, without CONFIGURATION."""
    hashed = {name: value for name, value in factors.items() if name != CONFIGURATION}
    canonical = json.dumps(hashed, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def encode_request(rank: Rank, proof: Proof | None = None) -> bytes:
    """Encode a request. The first one must be exactly that of stock: a stock listener crashes on
    any other."""
    if proof is None:
        return msgspec.msgpack.encode((GET_METADATA, *rank))
    return msgspec.msgpack.encode((PROVEN_METADATA, *rank, *proof))


def decode_request(message: bytes) -> HandshakeRequest:
    try:
        match msgspec.msgpack.decode(message, type=list[bytes | int]):
            case [name, int(pp), int(tp)] if name == GET_METADATA:
                return HandshakeRequest((pp, tp))
            case [name, int(pp), int(tp), bytes(challenge), bytes(nonce), bytes(mac)] if (
                name == PROVEN_METADATA
            ):
                return HandshakeRequest((pp, tp), Proof(challenge, nonce, mac))
            case other:
                raise WireError(f"handshake request: unknown message {other!r:.64}")
    except MALFORMED as error:
        raise WireError(f"handshake request: {error}") from None


def encode_payload(
    metadata: AgentMetadata,
    factors: Mapping[str, str],
    compat_hash: str | None = None,
    *,
    is_for_stock: bool = True,
) -> bytes:
    """Encode the answer. Without `is_for_stock`, stock engines find a hash that differs from
    theirs."""
    our_hash = compat_hash or compatibility_hash(factors)
    return msgspec.msgpack.encode(
        HandshakePayload(
            compatibility_hash=our_hash if is_for_stock else NOT_FOR_STOCK,
            agent_metadata_bytes=msgspec.msgpack.encode(metadata),
            compat_factors=dict(factors),
            hash_among_ours=None if is_for_stock else our_hash,
        )
    )


def encode_refusal(reason: str, challenge: bytes | None = None) -> bytes:
    """Encode a refusal. Our engines decode it as an error, and stock engines fail to decode it."""
    more = {} if challenge is None else {"challenge": challenge}
    return msgspec.msgpack.encode({"error": reason, **more})


def decode_challenge(message: bytes) -> bytes | None:
    """Return the challenge. Nothing else in the answer is read.

    Raises HandshakeRefusedError for a refusal that has none.
    """
    preface = _decode("handshake reply", message, _Preface)
    if preface.error is not None and preface.challenge is None:
        raise HandshakeRefusedError(preface.error[:500], None)
    return preface.challenge


def decode_payload(message: bytes) -> HandshakePayload:
    """Decode an answer. Raises HandshakeRefusedError for a refusal, WireError for malformed
    bytes."""
    preface = _decode("handshake reply", message, _Preface)
    if preface.error is not None:
        raise HandshakeRefusedError(preface.error[:500], preface.challenge)
    return _decode("handshake reply", message, HandshakePayload)


def as_stock(payload: HandshakePayload) -> HandshakePayload:
    """Return the payload of the same engine without our extension. Raises WireError."""
    metadata = msgspec.structs.replace(decode_metadata(payload), disagg_ext=None)
    inner = msgspec.msgpack.encode(metadata)
    return msgspec.structs.replace(payload, agent_metadata_bytes=inner)


def decode_metadata(payload: HandshakePayload) -> AgentMetadata:
    metadata = _decode("agent metadata", payload.agent_metadata_bytes, AgentMetadata)
    regions = len(metadata.kv_caches_base_addr)
    for name in _PER_REGION:
        values = getattr(metadata, name)
        if values is not None and len(values) != regions:
            raise WireError(f"agent metadata: {len(values)} {name} for {regions} regions")
    return metadata


def _decode(what: str, message: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(message, type=kind)
    except MALFORMED as error:
        raise WireError(f"{what}: {error}") from None
