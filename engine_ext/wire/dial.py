"""How a handshake begins: names are looked up aside, so that one slow name delays no other peer."""

import socket
import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol

from engine_ext.common.access import OPEN, Access, parse_address
from engine_ext.common.types import PeerAddress
from engine_ext.wire.client import HandshakeClient
from engine_ext.wire.errors import WireError
from engine_ext.wire.handshake import HandshakePayload

Resolve = Callable[[str], str]
"""Host name -> numeric address; may block. Raises OSError."""

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
    """One in flight. Neither method blocks; `receive` raises WireError, and is None until then."""

    def receive(self) -> HandshakePayload | None: ...
    def close(self) -> None: ...


class Dialer(Protocol):
    def dial(self, peer: PeerRank) -> PendingHandshake:
        """Begins a handshake, without blocking. Raises WireError."""

    def close(self) -> None: ...


class TcpDialer:
    """Its owner is one thread; lookups have one each, and are shared by those who wait for them."""

    def __init__(self, resolve: Resolve | None = None, access: Access = OPEN) -> None:
        self._resolve = resolve or _resolve
        self._access = access
        self._lookups: dict[str, Lookup] = {}

    def dial(self, peer: PeerRank) -> PendingHandshake:
        host = peer.address.host
        if parse_address(host) is not None:
            return self.connect(host, peer)
        self._lookups = {name: one for name, one in self._lookups.items() if not one.is_done}
        lookup = self._lookups.get(host)
        if lookup is None:
            if len(self._lookups) >= MAX_LOOKUPS:
                raise WireError(f"{len(self._lookups)} host names are being looked up already")
            lookup = self._lookups[host] = Lookup(host, self._resolve)
        return NamedHandshake(lookup, lambda address: self.connect(address, peer))

    def connect(self, address: str, peer: PeerRank) -> HandshakeClient:
        """`address`: the peer's host, looked up. Raises WireError where it is not allowed."""
        _, host, port, _, _ = peer.address
        if not self._access.peers.admit(address):
            raise WireError(f"{host} ({address}) is not one of this engine's allowed_peers")
        return HandshakeClient(address, port, (peer.stage, peer.rank), self._access, host)

    def close(self) -> None:
        """Handshakes are closed by those who began them."""


class Lookup:
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
        """None until it is done. Raises WireError where there is no such host."""
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
    """First the name, then the handshake."""

    def __init__(self, lookup: Lookup, connect: Callable[[str], HandshakeClient]) -> None:
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
    """IPv4 first, which a listener on a host's name is bound to."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in found]
    return next((one for one in addresses if ":" not in one), addresses[0])
