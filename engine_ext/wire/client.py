"""One handshake with another engine, from its question to the answer."""

import ipaddress
import socket

from engine_ext.common.access import OPEN, Access, parse_address
from engine_ext.wire.channel import Channel
from engine_ext.wire.errors import Rank, WireError
from engine_ext.wire.handshake import MAX_REPLY_BYTES, HandshakePayload, encode_request
from engine_ext.wire.secret_handshake import Prover, SideChannelAddress
from engine_ext.wire.zmtp import MessageLimits, ZmtpSession

REPLY = MessageLimits(frames=8, num_bytes=MAX_REPLY_BYTES)
"""An empty frame, payload, clock, and a mac; four may yet be added."""
CHUNK = 128 << 10


class HandshakeClient:
    """One handshake in flight. Never blocks: call `receive` when `socket` can be read."""

    def __init__(
        self,
        address: str,
        port: int,
        rank: Rank,
        access: Access = OPEN,
        announced: str | None = None,
    ) -> None:
        """`address` is numeric; `announced` the name whose address it is, and that the listener
        knows itself by. Raises WireError."""
        self._where = f"{address}:{port}"
        self._prover = Prover(access, rank, SideChannelAddress(announced or address, port))
        self._question: bytes | None = encode_request(rank)
        try:
            self._channel = _connect(address, port)
        except (OSError, OverflowError) as error:
            raise WireError(f"handshake with {self._where}: {error}") from None

    @property
    def socket(self) -> socket.socket:
        return self._channel.socket

    @property
    def num_bytes_kept(self) -> int:
        return self._channel.num_bytes_kept

    def receive(self) -> HandshakePayload | None:
        """The reply, or None while it has not come. Raises WireError."""
        try:
            self._channel.flush()
            self._channel.read()
            answer = self._take()
            self._ask()
        except OSError as error:
            raise WireError(f"handshake with {self._where}: {error}{self._hint(error)}") from None
        return answer

    def close(self) -> None:
        self._channel.close()

    def _hint(self, error: OSError) -> str:
        """Who is not let in is told nothing."""
        is_shut_out = isinstance(error, ConnectionResetError | ConnectionAbortedError)
        if self._channel.session.is_ready or not is_shut_out:
            return ""
        return "; is this engine one of its allowed_peers?"

    def _take(self) -> HandshakePayload | None:
        frames = self._channel.session.next_message()
        if frames is None:
            return None
        if len(frames) < 2 or frames[0]:
            raise WireError(f"handshake reply of {len(frames)} frames")
        answer = self._prover.take(frames[1:])
        if isinstance(answer, HandshakePayload):
            return answer
        self._question = answer
        return None

    def _ask(self) -> None:
        """Not before the listener is ready: libzmq ends a connection that speaks out of turn."""
        session = self._channel.session
        if self._question is not None and session.is_ready:
            session.send([b"", self._question])
            self._question = None
        self._channel.flush()


def _connect(address: str, port: int) -> Channel:
    """To that address and no other: nothing is looked up. Raises OSError, WireError."""
    found = parse_address(address)
    if found is None:
        raise WireError(f"{address} is not a numeric address")
    is_ipv6 = isinstance(found, ipaddress.IPv6Address)
    connection = socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        channel = Channel(connection, ZmtpSession(b"DEALER", REPLY), CHUNK)
        connection.connect(_endpoint(found, port))
    except BlockingIOError:
        return channel
    except BaseException:
        connection.close()
        raise
    return channel


def _endpoint(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int
) -> tuple[str, int] | tuple[str, int, int, int]:
    if isinstance(address, ipaddress.IPv4Address):
        return str(address), port
    return str(ipaddress.IPv6Address(int(address))), port, 0, _scope(address.scope_id)


def _scope(name: str | None) -> int:
    """The number of the interface behind the `%` of a link-local address."""
    if name is None:
        return 0
    return int(name) if name.isdecimal() else socket.if_nametoindex(name)
