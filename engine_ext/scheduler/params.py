"""`kv_transfer_params`, as a request carries it, parsed once into a typed record.

The dict is untrusted: it has crossed HTTP at least twice. `parse` is total: whatever it is given,
it returns a record and raises nothing, because an exception inside an engine hook ends the engine.
Keys and shapes are those of vLLM 0.32's NixlConnector.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

import msgspec

from engine_ext.common import resume_payload
from engine_ext.common.access import EVERYWHERE, Networks
from engine_ext.common.config import TransferMode
from engine_ext.common.prefix_hashes import MAX_TOKENS, PrefixHashes, UnusableHashes
from engine_ext.common.types import BlockIds, PeerAddress, PushTarget, RemoteSource

MAX_ID_LENGTH = 512
MAX_BLOCKS = 1 << 20
MAX_BLOCK_ID = (1 << 31) - 1
BLOCK_GROUP = tuple[Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCK_ID)], ...]

T = TypeVar("T")


class TransferRole(enum.Enum):
    """Our part in the transfer that a request asks for."""

    NONE = "none"
    PREFILL = "prefill"
    """We compute, a remote decode engine reads (`do_remote_decode`)."""
    DECODE = "decode"
    """A remote prefill engine has computed, we read (`do_remote_prefill`)."""


@dataclass(frozen=True, slots=True)
class TransferParams:
    """`source` is set when the role is DECODE, and when a prefill may pull the last turn's KV.

    `retain`: keep the KV when the answer is done, for the next turn. As the request says, and where
    it says nothing, if it came through a proxy for prefill and decode: upstream's keeps what such
    an answer says for the next turn, and says nothing.

    `problem` says in words why params that were there are not followed; the request is then an
    ordinary local one.
    """

    role: TransferRole
    source: RemoteSource | None = None
    proof: PrefixHashes | UnusableHashes = UnusableHashes.ABSENT
    """Which content the source's blocks hold."""
    target: PushTarget | None = None
    """In push mode, instead of `source`: who will write, for a DECODE role."""
    transfer_id: str | None = None
    """Push mode, either role: the router's name for the transfer."""
    hands_over: bool = False
    """A prefill tells, with its answer, the ids of its prompt and of what it has sampled."""
    retain: bool = False
    may_be_read_by_stock: bool = False
    """Who prefilled for us, and may read this turn, proves no prefix, so it may be a stock engine:
    it believes the time that it was told."""
    problem: str | None = None
    refused: PeerAddress | None = None
    """A decode request's other engine, where it is that which we may not dial."""


class _InvalidError(Exception):
    pass


def parse(
    raw: Any, mode: TransferMode = "pull", allowed_peers: Networks = EVERYWHERE
) -> TransferParams:
    """Total: returns a record for any object whatever, raises nothing.

    `mode` is how this engine, as D, gets KV from P. Params that name an address outside of
    `allowed_peers` are not followed; a host's name is judged when it has been looked up.
    """
    if raw is None:
        return TransferParams(TransferRole.NONE)
    try:
        return _allowed(_parse(raw, mode), allowed_peers)
    except _InvalidError as problem:
        return TransferParams(TransferRole.NONE, problem=str(problem))


def _parse(raw: Any, mode: TransferMode) -> TransferParams:
    if not isinstance(raw, dict):
        raise _InvalidError("kv_transfer_params is not an object")
    decode, prefill = (_flag(raw, key) for key in ("do_remote_decode", "do_remote_prefill"))
    if decode and prefill:
        raise _InvalidError("do_remote_decode and do_remote_prefill are both set")
    retain = _flag(raw, "retain")
    if decode:
        return replace(_prefill(raw), hands_over=_flag(raw, resume_payload.HAND_OVER))
    if not prefill:
        return TransferParams(TransferRole.NONE, retain=retain)
    target = _target(raw) if mode == "push" else None
    # Of a push there is no answer yet that could hold a proof: the router says what P is.
    proves = raw.get("proves_prefix") is True
    return TransferParams(
        TransferRole.DECODE,
        source=_source(raw) if target is None else None,
        target=target,
        transfer_id=None if target is None else target.transfer_id,
        proof=_proof(raw) if target is None else UnusableHashes.ABSENT,
        retain=retain or raw.get("retain") is None,
        may_be_read_by_stock=raw.get("prefix_proof") is None and not proves,
    )


def _allowed(params: TransferParams, peers: Networks) -> TransferParams:
    """A prefill that may not dial where the last turn is computes it."""
    origin = params.source or params.target
    if origin is None or peers.may_admit(origin.address.host):
        return params
    problem = f"remote_host {origin.address.host} is not one of this engine's allowed_peers"
    if params.role is TransferRole.PREFILL:
        return replace(params, source=None, problem=problem)
    return TransferParams(TransferRole.NONE, problem=problem, refused=origin.address)


def _prefill(raw: dict[Any, Any]) -> TransferParams:
    """An earlier turn that makes no sense costs its reuse, not the prefill."""
    transfer_id = _optional_identifier(raw, "transfer_id")
    if not raw.get("remote_block_ids"):
        return TransferParams(TransferRole.PREFILL, transfer_id=transfer_id)
    try:
        # Engines that do not say it yet prove what they hold, and may drop any turn.
        is_revocable = raw.get("prefix_proof") is not None and raw.get("revocable") is not False
        source = replace(_source(raw), is_revocable=is_revocable)
        return TransferParams(
            TransferRole.PREFILL, source=source, proof=_proof(raw), transfer_id=transfer_id
        )
    except _InvalidError as problem:
        return TransferParams(TransferRole.PREFILL, transfer_id=transfer_id, problem=str(problem))


def _source(raw: dict[Any, Any]) -> RemoteSource:
    _refuse_other_parallelism(raw)
    return RemoteSource(
        address=_address(raw),
        request_id=_field(raw, "remote_request_id", _notifiable),
        tp_size=_field(raw, "tp_size", _integer(1, 1024), default=1),
        block_ids=_field(raw, "remote_block_ids", _block_ids),
        num_tokens=_num_tokens(raw),
        block_size=_block_size(raw),
        expires_at=_unix_time(raw.get("retained_until")),
    )


def _proof(raw: dict[Any, Any]) -> PrefixHashes | UnusableHashes:
    """Asked for when the source has been checked."""
    return PrefixHashes.from_wire(raw.get("prefix_proof"), raw)


def _block_size(raw: dict[Any, Any]) -> int | None:
    """Ours alone: stock tells it in the handshake."""
    if raw.get("remote_block_size") is None:
        return None
    return _field(raw, "remote_block_size", _integer(1, MAX_TOKENS))


def _target(raw: dict[Any, Any]) -> PushTarget:
    _refuse_other_parallelism(raw)
    return PushTarget(
        address=_address(raw),
        tp_size=_field(raw, "tp_size", _integer(1, 1024), default=1),
        remote_request_id=_field(raw, "remote_request_id", _notifiable),
        transfer_id=_optional_identifier(raw, "transfer_id"),
        num_tokens=_num_tokens(raw),
    )


def _num_tokens(raw: dict[Any, Any]) -> int | None:
    """None where nobody has told: a push that begins before P has answered."""
    if raw.get("remote_num_tokens") is None:
        return None
    return _field(raw, "remote_num_tokens", _integer(0))


def _refuse_other_parallelism(raw: dict[Any, Any]) -> None:
    for key in ("dcp_size", "pcp_size"):
        if raw.get(key) not in (None, 1):
            raise _InvalidError(f"{key} is not 1: not supported")


def _address(raw: dict[Any, Any]) -> PeerAddress:
    return PeerAddress(
        engine_id=_field(raw, "remote_engine_id", _identifier),
        host=_field(raw, "remote_host", _identifier),
        port=_field(raw, "remote_port", _integer(1, 65535)),
        tp_size=_field(raw, "tp_size", _integer(1, 1024), default=1),
        pp_size=_field(raw, "pp_size", _integer(1, 1024), default=1),
    )


def _optional_identifier(raw: dict[Any, Any], key: str) -> str | None:
    return None if raw.get(key) is None else _field(raw, key, _notifiable)


def _flag(raw: dict[Any, Any], key: str) -> bool:
    value = raw.get(key)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise _InvalidError(f"{key} is not a boolean")


def _field(raw: dict[Any, Any], key: str, check: Callable[[Any], T], default: T | None = None) -> T:
    value = raw.get(key)
    if value is None:
        if default is None:
            raise _InvalidError(f"{key} is missing")
        return default
    try:
        return check(value)
    except _InvalidError as problem:
        raise _InvalidError(f"{key} {problem}") from None


def _identifier(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_ID_LENGTH:
        raise _InvalidError(f"is not a string of 1 to {MAX_ID_LENGTH} characters")
    if not value.isprintable() or not value.isascii():
        raise _InvalidError("holds characters outside printable ASCII")
    return value


def _notifiable(value: Any) -> str:
    """An id that fits a heartbeat, whose ids are separated by commas."""
    identifier = _identifier(value)
    if "," in identifier:
        raise _InvalidError("holds a comma")
    return identifier


def _unix_time(value: Any) -> float | None:
    """A hint: what makes no sense is as good as absent."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        return None
    return float(value)


def _integer(low: int, high: int = MAX_BLOCK_ID) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise _InvalidError(f"is not an integer from {low} to {high}")
        return value

    return check


def _block_ids(value: Any) -> BlockIds:
    """A list per KV-cache group; older peers send one flat list."""
    if not isinstance(value, list) or not value:
        raise _InvalidError("is not a list of block ids")
    groups = value if isinstance(value[0], list) else [value]
    if sum(len(group) for group in groups if isinstance(group, list)) > MAX_BLOCKS:
        raise _InvalidError(f"holds more than {MAX_BLOCKS} blocks")
    return tuple(map(_group, groups))


def _group(value: Any) -> tuple[int, ...]:
    """msgspec checks the thousands of ids of a long prompt five times as fast as Python can."""
    if not isinstance(value, list):
        raise _InvalidError("mixes lists and block ids")
    try:
        return msgspec.convert(value, BLOCK_GROUP)
    except msgspec.ValidationError:
        raise _InvalidError(f"holds what is not an integer from 0 to {MAX_BLOCK_ID}") from None
