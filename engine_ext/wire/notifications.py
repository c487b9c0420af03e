"""The notifications that engines send each other over NIXL.

vLLM 0.32 has three: `<request id>:<readers>` reports that blocks were read, `HB:<id>,<id>,...`
renews leases, and `PUSH_REG:` with a msgpack record asks for a WRITE. Between engines that both run
this extension (`disagg_ext` in the handshake), most notifications are `DX:` with a msgpack record,
and the important ones are answered. Peers are untrusted: decoding returns `UnknownMessage` for
anything else, and raises nothing.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated

import msgspec

from engine_ext.wire.errors import MALFORMED, MAX_IDS, Instant, Seconds, Unsigned

EXTENSION_PREFIX = b"DX:"
REGISTRATION_PREFIX = b"PUSH_REG:"
MAX_NOTIFICATION_BYTES = 16 << 10
"""Heartbeats longer than this are split."""
MAX_RECEIVED_BYTES = 1 << 20
"""Longer notifications are not decoded. It is enough for two hundred thousand block ids."""
MAX_KEYS = 16384
"""The most blocks that one request for a loan may name."""
MAX_TP_SIZE = 1024
MAX_PP_SIZE = 64

Name = Annotated[str, msgspec.Meta(max_length=1024)]
"""The name of a request, a transfer or an engine. It is bounded, because peers' names are kept for
some time."""
Names = Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_IDS)]
Digest = Annotated[bytes, msgspec.Meta(max_length=64)]
Sums = Annotated[bytes, msgspec.Meta(max_length=MAX_RECEIVED_BYTES)]
AgentBlob = Annotated[bytes, msgspec.Meta(max_length=256 << 10)]


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
    """Reader to source, once per pair: the NIXL agent that answers go to."""

    metadata: AgentBlob


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    """Reader to source: extend these leases. Answered by `Renewed`."""

    sequence: int
    request_ids: Names


class Renewed(msgspec.Struct, frozen=True, tag="renewed"):
    """Source to reader: the leases of that heartbeat hold for `seconds` from its arrival, those in
    `shorter` for less, and those in `gone` are not extended for this reader."""

    sequence: int
    seconds: Seconds
    gone: tuple[Name, ...] = ()
    shorter: dict[Name, Seconds] = {}
    clock: Instant = 0.0
    """The source's clock when the heartbeat arrived."""


class Read(msgspec.Struct, frozen=True, tag="read"):
    """Reader to source: this reader is done, because the data has arrived or will not be read.
    Answered by `ReadAck`, unless `sequence` is 0."""

    request_id: Name
    readers: int = 1
    sequence: int = 0
    wants_sums: bool = False
    """The reader compares checksums. A source without checksums answers without them."""


class ReadAck(msgspec.Struct, frozen=True, tag="ack"):
    """`valid`: the blocks were still those of the request, so the data that was read is right."""

    sequence: int
    valid: bool
    sums: tuple[Sums, ...] | None = None
    """Checksums of the blocks, by KV-cache group: see worker/checksums.py."""


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """Source to reader: these leases are not extended any more. The reader confirms each lease with
    `Read` when it is done. The source keeps the blocks until then, or until the reader's
    horizon."""

    request_ids: Names


class AskLoan(msgspec.Struct, frozen=True, tag="ask_loan"):
    """Reader to source: lend the longest prefix of these blocks that your prefix cache holds.
    Answered by `Loan`."""

    sequence: int
    scheme: Name
    """The name of the method that makes the keys. The source refuses keys of another method."""
    keys: Annotated[tuple[Digest, ...], msgspec.Meta(max_length=MAX_KEYS)]
    """Each names a full block by all tokens up to its end; in the order of the blocks."""


class Loan(msgspec.Struct, frozen=True, tag="loan"):
    """Source to reader: a lease of `seconds` on the first `num_tokens` tokens. The reader counts
    the seconds from when it asked, and renews and confirms the lease as any other. An empty id
    refuses."""

    sequence: int
    request_id: Name = ""
    block_ids: tuple[tuple[Unsigned, ...], ...] = ()
    """The blocks of each KV-cache group."""
    num_tokens: Unsigned = 0
    last_key: Digest = b""
    """The reader's own key of the last block: the proof that both mean the same tokens."""
    seconds: Seconds = 0.0
    may_hold_more: bool = False
    """The source's cache may hold more of the prefix, but the source lends no more of it now."""


class PushDone(msgspec.Struct, frozen=True, tag="push_done"):
    """P to D, after a WRITE: the data is in D's blocks."""

    request_id: Name
    generation: int


class PushFailed(msgspec.Struct, frozen=True, tag="push_failed"):
    """P to D: no WRITE of this registration is in progress, and none will begin. Data of a failed
    WRITE may still land for `seconds`."""

    request_id: Name
    generation: int
    reason: str
    seconds: Seconds = 0.0
    blocks_returned: bool = msgspec.field(default=False, name="is_given_back")
    """D asked for this with `ReturnBlocks`. P keeps its own blocks, and D registers again."""


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw"):
    """D to P: do not write, and free your blocks. Answered by `PushDone` if the WRITE was in
    progress, otherwise by `PushFailed`. With `generation` 0 nothing was registered, and there is no
    answer."""

    request_id: Name
    generation: int
    remote_request_id: Name
    transfer_id: Name | None = None


class AwaitPrompt(msgspec.Struct, frozen=True, tag="await_prompt"):
    """D to P: this request waits for blocks at D, and will register when P holds its prompt.
    Repeated until it is answered by `PromptReady`."""

    request_id: Name
    digest: Digest
    remote_request_id: Name
    transfer_id: Name | None = None


class PromptReady(msgspec.Struct, frozen=True, tag="prompt_ready"):
    """P to D: P holds the prompt, or never will. D registers in both cases. Then P writes, or
    refuses with a reason."""

    request_id: Name


class ReturnBlocks(msgspec.Struct, frozen=True, tag="return_blocks"):
    """D to P: do not write unless you hold the whole prompt, but keep your blocks. Repeated until
    it is answered by `PushFailed`, or by `PushDone` if P has written or is writing."""

    request_id: Name
    generation: int
    transfer_id: Name | None = None


class PushExtension(msgspec.Struct, frozen=True):
    """The fields that our registrations add to those of stock: token positions and a digest."""

    generation: int
    first_token: Unsigned
    last_token: Unsigned
    digest: Digest
    remote_request_id: Name
    begin_by: Instant
    """The time on P's clock after which no WRITE may begin."""
    tp_rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_TP_SIZE)] = 0
    """The tensor rank of D, of `decode_tp_size`, whose blocks these are."""
    pp_rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_PP_SIZE)] = 0
    pp_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_PP_SIZE)] = 1
    """The number of pipeline stages of D. `pp_rank` is the stage whose blocks these are."""


class PushRegistered(msgspec.Struct, frozen=True, kw_only=True):
    """D to P: write into these blocks. Field names are those of stock, which ignores `disagg`."""

    request_id: Name
    decode_engine_id: Name
    decode_host: Name
    decode_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    decode_tp_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_TP_SIZE)]
    local_block_ids: tuple[tuple[Unsigned, ...], ...]
    remote_engine_id: Name
    remote_host: Name
    remote_port: int
    remote_tp_size: int
    remote_pp_size: int = 1
    transfer_id: Name | None = None
    disagg: PushExtension | None = None


ExtensionMessage = (
    Hello
    | Renew
    | Renewed
    | Read
    | ReadAck
    | Gone
    | AskLoan
    | Loan
    | PushDone
    | PushFailed
    | Withdraw
    | AwaitPrompt
    | PromptReady
    | ReturnBlocks
)
Notification = ReadDone | Heartbeat | UnknownMessage | PushRegistered | ExtensionMessage

_extension_decoder: msgspec.msgpack.Decoder[ExtensionMessage] = msgspec.msgpack.Decoder(
    ExtensionMessage
)
_registration_decoder = msgspec.msgpack.Decoder(PushRegistered)


def encode_registration(message: PushRegistered) -> bytes:
    return REGISTRATION_PREFIX + msgspec.msgpack.encode(message)


def _decode_registration(message: bytes) -> PushRegistered | UnknownMessage:
    try:
        return _registration_decoder.decode(message[len(REGISTRATION_PREFIX) :])
    except MALFORMED:
        return UnknownMessage(message)


def without_extension(message: bytes) -> bytes | None:
    """Return a registration without the fields of our extension, or None for other messages."""
    registration = _decode_registration(message)
    if isinstance(registration, UnknownMessage):
        return None
    return encode_registration(msgspec.structs.replace(registration, disagg=None))


def encode_extension(message: ExtensionMessage) -> bytes:
    return EXTENSION_PREFIX + msgspec.msgpack.encode(message)


def _decode_extension(message: bytes) -> "ExtensionMessage | UnknownMessage":
    try:
        return _extension_decoder.decode(message[len(EXTENSION_PREFIX) :])
    except MALFORMED:
        return UnknownMessage(message)


def encode_read_done(request_id: str, readers: int = 1) -> bytes:
    return f"{request_id}:{readers}".encode()


def batch_ids(request_ids: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Split ids into as few batches as fit the size limit of a notification."""
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
    """Decode any bytes from a peer. Never raises."""
    if len(message) > MAX_RECEIVED_BYTES:
        return UnknownMessage(message[:256])
    if message.startswith(EXTENSION_PREFIX):
        return _decode_extension(message)
    if message.startswith(REGISTRATION_PREFIX):
        return _decode_registration(message)
    try:
        text = message.decode()
    except UnicodeDecodeError:
        return UnknownMessage(message)
    if text.startswith("HB:"):
        return Heartbeat(tuple(filter(None, text[3:].split(",", MAX_IDS)[:MAX_IDS])))
    request_id, separator, readers = text.rpartition(":")
    if not separator or not request_id or not (readers.isascii() and readers.isdigit()):
        return UnknownMessage(message)
    if len(readers) > 6 or int(readers) < 1:
        return UnknownMessage(message)
    return ReadDone(request_id, int(readers))
