"""The dialer of the side channel: it begins handshakes with other engines, without blocking.

Host names are resolved in threads of their own, so that one slow name delays no other peer.
"""

import ipaddress
import socket
import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol

from engine_ext.common.access import OPEN, Access, parse_address
from engine_ext.common.types import PeerAddress
from engine_ext.wire.channel import Channel
from engine_ext.wire.errors import Rank, WireError
from engine_ext.wire.handshake import MAX_REPLY_BYTES, HandshakePayload, encode_request
from engine_ext.wire.secret_handshake import Prover, SideChannelAddress
from engine_ext.wire.zmtp import MessageLimits, ZmtpSession

REPLY = MessageLimits(frames=8, num_bytes=MAX_REPLY_BYTES)
"""An empty frame, payload, clock and mac. Four more are allowed for later versions."""
CHUNK = 128 << 10


class HandshakeClient:
    """One handshake with an engine. It never blocks: call `receive` when `socket` is readable."""

    def __init__(
        self,
        address: str,
        port: int,
        rank: Rank,
        access: Access = OPEN,
        announced: str | None = None,
    ) -> None:
        """`address` is numeric. `announced` is the host name of the address, as the listener
        announces it. Raises WireError."""
        self._peer = f"{address}:{port}"
        self._prover = Prover(access, rank, SideChannelAddress(announced or address, port))
        self._request: bytes | None = encode_request(rank)
        try:
            self._channel = _connect(address, port)
        except (OSError, OverflowError) as error:
            raise WireError(f"handshake with {self._peer}: {error}") from None

    @property
    def socket(self) -> socket.socket:
        return self._channel.socket

    @property
    def num_bytes_kept(self) -> int:
        return self._channel.num_bytes_kept

    def receive(self) -> HandshakePayload | None:
        """Return the reply, or None if it has not arrived. Raises WireError."""
        try:
            self._channel.flush()
            self._channel.read()
            answer = self._take()
            self._send_request()
        except OSError as error:
            raise WireError(f"handshake with {self._peer}: {error}{self._hint(error)}") from None
        return answer

    def close(self) -> None:
        self._channel.close()

    def _hint(self, error: OSError) -> str:
        """Explain a closed connection: a listener sends nothing to a peer that is not allowed."""
        is_reset = isinstance(error, ConnectionResetError | ConnectionAbortedError)
        if self._channel.session.is_ready or not is_reset:
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
        self._request = answer
        return None

    def _send_request(self) -> None:
        """Send the request once the listener is ready: libzmq closes a connection that sends
        earlier."""
        session = self._channel.session
        if self._request is not None and session.is_ready:
            session.send([b"", self._request])
            self._request = None
        self._channel.flush()


def _connect(address: str, port: int) -> Channel:
    """Connect to a numeric address. Raises OSError, WireError."""
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
    """Return the number of the interface after the `%` of a link-local address."""
    if name is None:
        return 0
    return int(name) if name.isdecimal() else socket.if_nametoindex(name)


Resolve = Callable[[str], str]
"""Returns the numeric address of a host name. It may block, and raises OSError."""

MAX_LOOKUPS = 64


class PeerRank(NamedTuple):
    address: PeerAddress
    rank: int
    """Tensor rank."""
    stage: int = 0
    """Pipeline rank."""

    def __str__(self) -> str:
        engine_id, host, port, _, pp_size = self.address
        stage = f" of stage {self.stage}" if pp_size > 1 else ""
        return f"engine {engine_id} at {host}:{port}, rank {self.rank}{stage}"


class PendingHandshake(Protocol):
    """A handshake in progress. Neither method blocks. `receive` returns None until the reply has
    arrived, and raises WireError."""

    def receive(self) -> HandshakePayload | None: ...
    def close(self) -> None: ...


class Dialer(Protocol):
    def dial(self, peer: PeerRank) -> PendingHandshake:
        """Begin a handshake, without blocking. Raises WireError."""


class TcpDialer:
    """Owned by one thread. Each lookup has a thread of its own, which handshakes with the same host
    share."""

    def __init__(self, resolve: Resolve | None = None, access: Access = OPEN) -> None:
        self._resolve = resolve or _resolve
        self._access = access
        self._lookups: dict[str, HostLookup] = {}

    def dial(self, peer: PeerRank) -> PendingHandshake:
        host = peer.address.host
        if parse_address(host) is not None:
            return self.connect(host, peer)
        self._lookups = {name: one for name, one in self._lookups.items() if not one.is_done}
        lookup = self._lookups.get(host)
        if lookup is None:
            if len(self._lookups) >= MAX_LOOKUPS:
                raise WireError(f"{len(self._lookups)} host names are being looked up already")
            lookup = self._lookups[host] = HostLookup(host, self._resolve)
        return NamedHandshake(lookup, lambda address: self.connect(address, peer))

    def connect(self, address: str, peer: PeerRank) -> HandshakeClient:
        """Begin a handshake with the peer at a resolved address. Raises WireError if it is not
        allowed."""
        _, host, port, _, _ = peer.address
        if not self._access.peers.admit(address):
            raise WireError(f"{host} ({address}) is not one of this engine's allowed_peers")
        return HandshakeClient(address, port, (peer.stage, peer.rank), self._access, host)


class HostLookup:
    """One host name that is being resolved."""

    def __init__(self, host: str, resolve: Resolve) -> None:
        self._host = host
        self._resolve = resolve
        self._found: str | None = None
        self._problem: str | None = None
        self._done = threading.Event()
        threading.Thread(target=self._run, name="kv-lookup", daemon=True).start()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def result(self) -> str | None:
        """Return the address, or None until it is known. Raises WireError if there is no such
        host."""
        if self._problem is not None:
            raise WireError(self._problem)
        return self._found

    def _run(self) -> None:
        try:
            self._found = self._resolve(self._host)
        except (OSError, UnicodeError) as error:
            self._problem = f"host {self._host}: {error}"
        finally:
            self._done.set()


class NamedHandshake:
    """A handshake that begins when the host name is resolved."""

    def __init__(self, lookup: HostLookup, connect: Callable[[str], HandshakeClient]) -> None:
        self._lookup = lookup
        self._connect = connect
        self._client: HandshakeClient | None = None

    def receive(self) -> HandshakePayload | None:
        if self._client is None:
            host = self._lookup.result()
            if host is None:
                return None
            self._client = self._connect(host)
        return self._client.receive()

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


def _resolve(host: str) -> str:
    """Return an IPv4 address if there is one: a listener on a host name is bound to IPv4."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in found]
    return next((one for one in addresses if ":" not in one), addresses[0])
