"""The `kv_transfer_params` of a request, parsed once into a typed record.

The dict is untrusted: it has crossed HTTP at least twice. `parse` returns a record for any input
and raises nothing, because an exception inside an engine hook ends the engine.
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
from engine_ext.common.types import BlockIds, Holder, PeerAddress, PushTarget, RemoteSource

MAX_ID_LENGTH = 512
MAX_BLOCKS = 1 << 20
MAX_HOLDERS = 4
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
    """The transfer that a request asks for."""

    role: TransferRole
    source: RemoteSource | None = None
    """The KV to read: a prompt's for a DECODE role, the last turn's for a PREFILL role."""
    proof: PrefixHashes | UnusableHashes = UnusableHashes.ABSENT
    """The content of the source's blocks."""
    target: PushTarget | None = None
    """In push mode, instead of `source`: the engine that will write, for a DECODE role."""
    transfer_id: str | None = None
    """Push mode, either role: the router's name for the transfer."""
    hands_over: bool = False
    """The prefill's answer includes the ids of its prompt and of the token that it sampled."""
    retain: bool = False
    """Keep the KV for the next turn when the answer is done. By default true for a DECODE role:
    upstream's multi-turn proxies use retained KV and do not send this field."""
    may_be_read_by_stock: bool = False
    """The prefill engine sent no prefix hashes, so it may be a stock engine. It may read this turn
    until the expiry time in our answer, and we cannot notify it earlier."""
    problem: str | None = None
    """Why the params are not followed. The request is then an ordinary local one."""
    holders: tuple[Holder, ...] = ()
    """Not for a DECODE role: the engines to ask for a loan of the prompt's prefix, best first."""
    refused: PeerAddress | None = None
    """The other engine of a decode request, if it is not one of `allowed_peers`."""


class _InvalidError(Exception):
    pass


def parse(
    raw: Any, mode: TransferMode = "pull", allowed_peers: Networks = EVERYWHERE
) -> TransferParams:
    """Return a record for any object. `mode` is how this engine, as D, gets KV from P.

    Params that name an address outside of `allowed_peers` are not followed. The dialer checks a
    host name when it has been resolved.
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
        params = replace(_prefill(raw), hands_over=_flag(raw, resume_payload.HAND_OVER))
        return _with_holders(params, raw)
    if not prefill:
        return _with_holders(TransferParams(TransferRole.NONE, retain=retain), raw)
    target = _target(raw) if mode == "push" else None
    # A push has no answer of P yet that could hold hashes, so the router sends what P supports.
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
    """Drop engines that may not be dialled. A prefill computes the last turn itself then."""
    if any(not peers.may_admit(one.address.host) for one in params.holders):
        holders = tuple(one for one in params.holders if peers.may_admit(one.address.host))
        problem = "a holder's remote_host is not one of this engine's allowed_peers"
        params = replace(params, holders=holders, problem=params.problem or problem)
    origin = params.source or params.target
    if origin is None or peers.may_admit(origin.address.host):
        return params
    problem = f"remote_host {origin.address.host} is not one of this engine's allowed_peers"
    if params.role is TransferRole.PREFILL:
        return replace(params, source=None, problem=problem)
    return TransferParams(TransferRole.NONE, problem=problem, refused=origin.address)


def _prefill(raw: dict[Any, Any]) -> TransferParams:
    """Parse a prefill leg. If the params of the last turn are malformed, only its reuse is lost."""
    transfer_id = _transfer_id(raw)
    if not raw.get("remote_block_ids"):
        return TransferParams(TransferRole.PREFILL, transfer_id=transfer_id)
    try:
        # Older engines send hashes, do not send `revocable`, and may drop any turn.
        is_revocable = raw.get("prefix_proof") is not None and raw.get("revocable") is not False
        source = replace(_source(raw), is_revocable=is_revocable)
        return TransferParams(
            TransferRole.PREFILL, source=source, proof=_proof(raw), transfer_id=transfer_id
        )
    except _InvalidError as problem:
        return TransferParams(TransferRole.PREFILL, transfer_id=transfer_id, problem=str(problem))


def _with_holders(params: TransferParams, raw: dict[Any, Any]) -> TransferParams:
    """Add the holders that are well formed."""
    named = raw.get("holders")
    if named is None:
        return params
    if not isinstance(named, list) or len(named) > MAX_HOLDERS:
        problem = f"holders is not a list of at most {MAX_HOLDERS}"
        return replace(params, problem=params.problem or problem)
    holders: list[Holder] = []
    for index, one in enumerate(named):
        try:
            holders.append(_holder(one, index))
        except _InvalidError as malformed:
            params = replace(params, problem=params.problem or str(malformed))
    return replace(params, holders=tuple(holders))


def _holder(raw: Any, index: int) -> Holder:
    if not isinstance(raw, dict):
        raise _InvalidError("a holder is not an object")
    return Holder(_address(raw), _field(raw, "expected_tokens", _integer(0)), index)


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
    """Read the hashes. Call this after `_source`, which checks the other fields."""
    return PrefixHashes.from_wire(raw.get("prefix_proof"), raw)


def _block_size(raw: dict[Any, Any]) -> int | None:
    """None from a stock engine, which sends it only in the handshake."""
    if raw.get("remote_block_size") is None:
        return None
    return _field(raw, "remote_block_size", _integer(1, MAX_TOKENS))


def _target(raw: dict[Any, Any]) -> PushTarget:
    _refuse_other_parallelism(raw)
    return PushTarget(
        address=_address(raw),
        tp_size=_field(raw, "tp_size", _integer(1, 1024), default=1),
        remote_request_id=_field(raw, "remote_request_id", _notifiable),
        transfer_id=_transfer_id(raw),
        num_tokens=_num_tokens(raw),
    )


def _num_tokens(raw: dict[Any, Any]) -> int | None:
    """None for a push that begins before P has answered."""
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


def _transfer_id(raw: dict[Any, Any]) -> str | None:
    return None if raw.get("transfer_id") is None else _field(raw, "transfer_id", _notifiable)


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
    """Return None for an invalid time: it is only a hint."""
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
