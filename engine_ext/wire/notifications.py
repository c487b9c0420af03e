"""Every byte that leaves the process, besides the KV itself.

Handshake, over ZMQ (vLLM 0.32 NixlConnector, connector version 14): the reader sends msgpack
`(b"get_meta_msg", pp_rank, tp_rank)`; the listener answers two frames, a `HandshakePayload` and
its perf_counter. Notifications, over NIXL: `<request id>:<readers>` says that blocks were read,
`HB:<id>,<id>,...` renews leases. Between engines that both run this extension (`disagg_ext` in the
inner map says so) they are `DX:` and a msgpack record instead, and those that matter are answered.
Peers are untrusted: decoding raises `WireError` or returns `UnknownMessage`, nothing else.
"""

import hashlib
import json
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import zmq

logger = logging.getLogger(__name__)

CONNECTOR_VERSION = 14
EXTENSION_VERSION = 1
EXTENSION_PREFIX = b"DX:"
REGISTRATION_PREFIX = b"PUSH_REG:"
GET_METADATA = b"get_meta_msg"
MAX_REQUEST_BYTES = 4096
MAX_REPLY_BYTES = 64 << 20
SILENT_CONNECTION_MS = 5000
"""What a connection that does not begin to speak is kept for."""
UNREAD_ANSWERS = 16
MAX_NOTIFICATION_BYTES = 16 << 10
"""Heartbeats longer than this are split."""

MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not what they should be."""

Unsigned = Annotated[int, msgspec.Meta(ge=0)]

Rank = tuple[int, int]
"""(pipeline rank, tensor rank)."""


class WireError(Exception):
    """What a peer sent is not what the protocol says."""


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
    lease_extension: float = 0.0
    """Seconds that one heartbeat grants here from its arrival."""
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


def compatibility_hash(factors: Mapping[str, str]) -> str:
    """sha256, hex, over the factors in canonical form."""
    canonical = json.dumps(dict(factors), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def encode_request(rank: Rank) -> bytes:
    return msgspec.msgpack.encode((GET_METADATA, *rank))


def decode_request(message: bytes) -> Rank:
    try:
        name, pp_rank, tp_rank = msgspec.msgpack.decode(message, type=tuple[bytes, int, int])
    except MALFORMED as error:
        raise WireError(f"handshake request: {error}") from None
    if name != GET_METADATA:
        raise WireError(f"handshake request: unknown message {name[:32]!r}")
    return pp_rank, tp_rank


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


def encode_refusal(reason: str) -> bytes:
    """Decodes on our side as an error, and fails to decode at once on stock's."""
    return msgspec.msgpack.encode({"error": reason})


def decode_payload(message: bytes) -> HandshakePayload:
    try:
        refusal = msgspec.msgpack.decode(message, type=dict[str, Any]).get("error")
        if refusal is not None:
            raise WireError(f"handshake refused by the peer: {str(refusal)[:500]}")
        return msgspec.msgpack.decode(message, type=HandshakePayload)
    except MALFORMED as error:
        raise WireError(f"handshake reply: {error}") from None


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


@dataclass(frozen=True, slots=True)
class ReadDone:
    """One of `readers` ranks has read the blocks of P's request."""

    request_id: str
    readers: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UnknownMessage:
    message: bytes


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Reader to holder, once per pair: the agent to send answers to."""

    metadata: bytes


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    """Reader to holder: extend these leases. Answered by `Renewed`."""

    sequence: int
    request_ids: tuple[str, ...]


class Renewed(msgspec.Struct, frozen=True, tag="renewed"):
    """All of the named heartbeat's leases are extended, except those that are gone."""

    sequence: int
    gone: tuple[str, ...] = ()


class Read(msgspec.Struct, frozen=True, tag="read"):
    """Reader to holder: the data has arrived. Answered by `ReadAck`, unless `sequence` is 0."""

    request_id: str
    readers: int = 1
    sequence: int = 0


class ReadAck(msgspec.Struct, frozen=True, tag="ack"):
    """`valid`: until now the blocks were those of the request; what was read is right."""

    sequence: int
    valid: bool


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """Holder to reader: these leases ended unread; what is read from now on may be wrong."""

    request_ids: tuple[str, ...]


class PushDone(msgspec.Struct, frozen=True, tag="push_done"):
    """P to D, behind a WRITE: the data stands in D's blocks."""

    request_id: str
    generation: int


class PushFailed(msgspec.Struct, frozen=True, tag="push_failed"):
    """P to D: this registration will never be written, now or later."""

    request_id: str
    generation: int
    reason: str


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw"):
    """D to P: do not write, and free your blocks. Answered by `PushDone` if the WRITE was under
    way, else by `PushFailed`, unless `generation` is 0: then nothing was registered."""

    request_id: str
    generation: int
    remote_request_id: str
    transfer_id: str | None = None


class PushExtension(msgspec.Struct, frozen=True):
    """What our registrations carry beyond stock's. Token positions; `digest` as in verify.py."""

    generation: int
    first_token: Unsigned
    last_token: Unsigned
    digest: bytes
    remote_request_id: str
    tp_rank: int = 0
    """Whose blocks these are, of `decode_tp_size`."""


class PushRegistered(msgspec.Struct, frozen=True, kw_only=True):
    """D to P: write into these blocks. Field names are stock's; stock ignores `disagg`."""

    request_id: str
    decode_engine_id: str
    decode_host: str
    decode_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    decode_tp_size: int
    local_block_ids: tuple[tuple[Unsigned, ...], ...]
    remote_engine_id: str
    remote_host: str
    remote_port: int
    remote_tp_size: int
    remote_pp_size: int = 1
    transfer_id: str | None = None
    disagg: PushExtension | None = None


ExtensionMessage = (
    Hello | Renew | Renewed | Read | ReadAck | Gone | PushDone | PushFailed | Withdraw
)
Notification = ReadDone | Heartbeat | UnknownMessage | PushRegistered | ExtensionMessage

_extension_decoder: msgspec.msgpack.Decoder[ExtensionMessage] = msgspec.msgpack.Decoder(
    Hello | Renew | Renewed | Read | ReadAck | Gone | PushDone | PushFailed | Withdraw
)
_registration_decoder = msgspec.msgpack.Decoder(PushRegistered)


def encode_registration(message: PushRegistered) -> bytes:
    return REGISTRATION_PREFIX + msgspec.msgpack.encode(message)


def _decode_registration(message: bytes) -> PushRegistered | UnknownMessage:
    try:
        return _registration_decoder.decode(message[len(REGISTRATION_PREFIX) :])
    except MALFORMED:
        return UnknownMessage(message)


def encode_extension(message: ExtensionMessage) -> bytes:
    return EXTENSION_PREFIX + msgspec.msgpack.encode(message)


def _decode_extension(message: bytes) -> "ExtensionMessage | UnknownMessage":
    try:
        return _extension_decoder.decode(message[len(EXTENSION_PREFIX) :])
    except MALFORMED:
        return UnknownMessage(message)


def encode_read_done(request_id: str, readers: int = 1) -> bytes:
    return f"{request_id}:{readers}".encode()


def batches(request_ids: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """As few batches as fit the size limit of a notification."""
    batch: list[str] = []
    size = 0
    for request_id in request_ids:
        if batch and size + len(request_id) > MAX_NOTIFICATION_BYTES:
            yield tuple(batch)
            batch, size = [], 0
        batch.append(request_id)
        size += len(request_id) + 5
    if batch:
        yield tuple(batch)


def encode_heartbeat(request_ids: Iterable[str]) -> bytes:
    return b"HB:" + ",".join(request_ids).encode()


def decode_notification(message: bytes) -> Notification:
    """Total: whatever a peer sent, no exception."""
    if message.startswith(EXTENSION_PREFIX):
        return _decode_extension(message)
    if message.startswith(REGISTRATION_PREFIX):
        return _decode_registration(message)
    try:
        text = message.decode()
    except UnicodeDecodeError:
        return UnknownMessage(message)
    if text.startswith("HB:"):
        return Heartbeat(tuple(filter(None, text[3:].split(","))))
    request_id, separator, readers = text.rpartition(":")
    if not separator or not request_id or not (readers.isascii() and readers.isdigit()):
        return UnknownMessage(message)
    if len(readers) > 6 or int(readers) < 1:
        return UnknownMessage(message)
    return ReadDone(request_id, int(readers))


class HandshakeServer:
    """Answers `get_meta_msg` for every rank of this engine, from a thread of its own.

    Raises OSError from the constructor when the address cannot be bound.
    """

    def __init__(self, host: str, port: int, payloads: Mapping[Rank, bytes]) -> None:
        self._payloads = dict(payloads)
        self._context = zmq.Context()
        self._stop = threading.Event()
        try:
            self._socket = self._bind(host, port)
        except zmq.ZMQError as error:
            self._context.term()
            raise OSError(f"side channel {host}:{port}: {error}") from None
        self._thread = threading.Thread(target=self._run, name="kv-handshake", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return self._port

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)
        self._context.destroy(linger=0)

    def _bind(self, host: str, port: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.ROUTER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
            socket.setsockopt(zmq.HANDSHAKE_IVL, SILENT_CONNECTION_MS)
            # A reader has one question at a time; who does not read the answers loses them.
            socket.setsockopt(zmq.SNDHWM, UNREAD_ANSWERS)
            socket.setsockopt(zmq.RCVHWM, UNREAD_ANSWERS)
            socket.setsockopt(zmq.IPV6, int(":" in host))
            socket.bind(zmq_address(host, port))
        except zmq.ZMQError:
            socket.close(linger=0)
            raise
        self._port = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        return socket

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                if self._socket.poll(100):
                    self._answer(self._socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                continue
            except zmq.ZMQError:
                logger.exception("handshake listener")
                self._stop.wait(0.1)
        self._socket.close(linger=0)

    def _answer(self, frames: list[bytes]) -> None:
        """`[peer, b"", request]` from a REQ or DEALER socket; anything else gets no answer."""
        if len(frames) != 3 or frames[1]:
            logger.debug("handshake listener: ignored %d frames", len(frames))
            return
        clock = msgspec.msgpack.encode(time.perf_counter())
        self._socket.send_multipart([frames[0], b"", self._reply(frames[2]), clock], zmq.NOBLOCK)

    def _reply(self, request: bytes) -> bytes:
        try:
            rank = decode_request(request)
        except WireError as error:
            return encode_refusal(str(error))
        payload = self._payloads.get(rank)
        return payload or encode_refusal(f"no worker of pipeline, tensor rank {rank}")


class HandshakeClient:
    """One handshake in flight. Never blocks: poll `socket` for reading, then call `receive`."""

    def __init__(self, context: "zmq.Context[Any]", host: str, port: int, rank: Rank) -> None:
        try:
            self.socket = context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise WireError(f"handshake with {host}:{port}: {error}") from None
        try:
            self.socket.setsockopt(zmq.LINGER, 0)
            self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY_BYTES)
            self.socket.setsockopt(zmq.IPV6, int(":" in host))
            self.socket.connect(zmq_address(host, port))
            self.socket.send_multipart([b"", encode_request(rank)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self.close()
            raise WireError(f"handshake with {host}:{port}: {error}") from None

    def receive(self) -> HandshakePayload | None:
        """The reply, or None while it has not come. Raises WireError."""
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        except zmq.ZMQError as error:
            raise WireError(f"handshake: {error}") from None
        if len(frames) < 2 or frames[0]:
            raise WireError(f"handshake reply of {len(frames)} frames")
        return decode_payload(frames[1])

    def close(self) -> None:
        self.socket.close(linger=0)


def zmq_address(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
