"""Access to the side channel: a shared secret, a list of networks, or neither.

docs/security.md explains what each of them prevents.
"""

import hashlib
import hmac
import ipaddress
import re
import socket
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 64 << 10

_SCOPED = re.compile(r"[0-9A-Fa-f:.]+%[0-9A-Za-z._-]{1,15}")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class SharedSecret:
    """The secret that the engines of a fleet share. It is kept as two derived keys, so that no
    field of a handshake can pass for a message. Neither key is shown."""

    handshake_key: bytes = field(repr=False)
    seal_key: bytes = field(repr=False)

    @classmethod
    def of(cls, shared: bytes) -> "SharedSecret":
        """Derive the keys. Raises ValueError if the secret is too short."""
        if len(shared) < MIN_SECRET_BYTES:
            raise ValueError(f"{len(shared)} bytes, at least {MIN_SECRET_BYTES} are needed")
        return cls(_derive(shared, b"handshake"), _derive(shared, b"seal"))


@dataclass(frozen=True, slots=True)
class Networks:
    """The networks of allowed peers."""

    networks: tuple[Network, ...]

    def admit(self, address: str) -> bool:
        """Return True if the address is in a network. False for anything but a numeric address."""
        found = parse_address(address)
        return found is not None and any(found in network for network in self.networks)

    def may_admit(self, host: str) -> bool:
        """Return False for an address outside the networks. A name is not resolved here: the dialer
        checks its address."""
        return parse_address(host) is None or self.admit(host)


EVERYWHERE = Networks((ipaddress.ip_network("0.0.0.0/0"), ipaddress.ip_network("::/0")))


@dataclass(frozen=True, slots=True)
class Access:
    """The rules for the side channel: the secret that peers must prove, and the networks that they
    must be in. `is_mixed`: engines without the secret may use the stock protocol."""

    secret: SharedSecret | None = None
    is_mixed: bool = False
    peers: Networks = EVERYWHERE


OPEN = Access()


@lru_cache(1024)  # Each request names the same few engines.
def parse_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return a numeric address, or None. An IPv4-mapped IPv6 address is returned as IPv4. A scope
    must look like an interface, because the standard library accepts any text."""
    if "%" in text and not _SCOPED.fullmatch(text):
        return None
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def read_secret(key: str, value: Any) -> SharedSecret:
    """Read the secret from the file with path `value`. Raises ValueError with a one-line
    message."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{key}: {value!r} is not a path")
    try:
        path = Path(value)
        if path.exists() and not path.is_file():
            raise ValueError("not an ordinary file")
        with path.open("rb") as file:
            return SharedSecret.of(file.read(MAX_SECRET_BYTES).strip())
    except (OSError, ValueError) as error:
        raise ValueError(f"{key}: {value}: {error}") from None


def parse_networks(key: str, value: Any) -> Networks:
    """Read a list of networks, addresses and host names. A name stands for its present addresses.

    Raises ValueError with a one-line message.
    """
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value) or not value:
        raise ValueError(f"{key}: {value!r} is not a list of networks, addresses and host names")
    return Networks(tuple(network for entry in value for network in _networks_of(key, entry)))


def _networks_of(key: str, entry: str) -> list[Network]:
    try:
        if "/" in entry or parse_address(entry) is not None:
            return [ipaddress.ip_network(parse_address(entry) or entry)]
        found = socket.getaddrinfo(entry, None, type=socket.SOCK_STREAM)
    except (ValueError, OSError) as error:
        raise ValueError(f"{key}: {entry}: {error}") from None
    return [ipaddress.ip_network(address) for address in sorted({str(one[4][0]) for one in found})]


def _derive(shared: bytes, purpose: bytes) -> bytes:
    return hmac.digest(shared, b"disagg-router side channel 1: " + purpose, hashlib.sha256)
