"""Who may use this engine's side channel, and with whom: a shared secret, networks, or neither.

See docs/security.md for what each of them stops.
"""

import hashlib
import hmac
import ipaddress
import re
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 64 << 10

_SCOPED = re.compile(r"[0-9A-Fa-f:.]+%[0-9A-Za-z._-]{1,15}")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class SharedSecret:
    """What the engines of a fleet share. Kept as two keys, so that nothing that is said in a
    handshake can pass for a message; neither is shown."""

    handshake_key: bytes = field(repr=False)
    seal_key: bytes = field(repr=False)

    @classmethod
    def of(cls, shared: bytes) -> "SharedSecret":
        """Raises ValueError where it is too short to be one."""
        if len(shared) < MIN_SECRET_BYTES:
            raise ValueError(f"{len(shared)} bytes, at least {MIN_SECRET_BYTES} are needed")
        return cls(_derive(shared, b"handshake"), _derive(shared, b"seal"))


@dataclass(frozen=True, slots=True)
class Networks:
    """Addresses of peers, as networks."""

    networks: tuple[Network, ...]

    def admit(self, address: str) -> bool:
        """False for what is not a numeric address."""
        found = parse_address(address)
        return found is not None and any(found in network for network in self.networks)

    def may_admit(self, host: str) -> bool:
        """False for an address outside. A name is not looked up: whoever dials it asks again."""
        return parse_address(host) is None or self.admit(host)


EVERYWHERE = Networks((ipaddress.ip_network("0.0.0.0/0"), ipaddress.ip_network("::/0")))


@dataclass(frozen=True, slots=True)
class Access:
    """`is_mixed`: engines without the secret are let in as far as stock's protocol goes."""

    secret: SharedSecret | None = None
    is_mixed: bool = False
    peers: Networks = EVERYWHERE


OPEN = Access()


def parse_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """None for what is not numeric. IPv4 in IPv6's clothes is IPv4. A scope is an interface: the
    standard library takes anything for one."""
    if "%" in text and not _SCOPED.fullmatch(text):
        return None
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def read_secret(key: str, value: Any) -> SharedSecret:
    """`value`: a path. Raises ValueError, one line that names both."""
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
    """Of networks, addresses and host names; a name stands for the addresses that it has now.

    Raises ValueError, one line, for what is none of these.
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
