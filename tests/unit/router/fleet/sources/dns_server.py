"""A name server on loopback, UDP and TCP, that answers what a test says."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import dns.asyncresolver
import dns.flags
import dns.message
import dns.rcode
import dns.rrset
from dns.rdatatype import to_text

from tests.conftest import find_free_ports

SMALL = 512


@dataclass
class Zone:
    """`records` are lines as in a zone file, by (name, type). `code`, `is_mute` and `garbage` are
    how the server fails, for questions of the types in `failing`, or for all."""

    records: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    additional: list[str] = field(default_factory=list)
    code: dns.rcode.Rcode = dns.rcode.NOERROR
    is_mute: bool = False
    garbage: bytes = b""
    failing: tuple[str, ...] = ()
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    port: int = 0

    def has(self, name: str, kind: str, *data: str, ttl: int = 30) -> None:
        self.names.add(name)
        self.records[name, kind] = [f"{name} {ttl} IN {kind} {one}" for one in data]

    def resolver(self) -> dns.asyncresolver.Resolver:
        made = dns.asyncresolver.Resolver(configure=False)
        made.nameservers, made.port, made.lifetime, made.timeout = ["127.0.0.1"], self.port, 1, 0.5
        made.search = [dns.name.from_text("search.test.")]
        made.ndots = 1
        return made

    def answer(self, data: bytes, way: str) -> bytes | None:
        query = dns.message.from_wire(data)
        question = query.question[0]
        name, kind = str(question.name).rstrip("."), to_text(question.rdtype)
        self.asked.append((name, kind, way))
        reply = dns.message.make_response(query)
        if not self.failing or kind in self.failing:
            if self.is_mute:
                return None
            if self.garbage:
                return data[:2] + self.garbage
            reply.set_rcode(self.code)
        if reply.rcode() == dns.rcode.NOERROR:
            self._fill(reply, name, kind)
        wire = reply.to_wire(max_size=65535)
        if way == "udp" and len(wire) > SMALL:
            short = dns.message.make_response(query)
            short.flags |= dns.flags.TC
            wire = short.to_wire()
        return wire

    def _fill(self, reply: dns.message.Message, name: str, kind: str) -> None:
        if name not in self.names:
            reply.set_rcode(dns.rcode.NXDOMAIN)
        for section, lines in (
            (reply.answer, self.records.get((name, "CNAME"), [])),
            (reply.answer, self.records.get((name, kind), [])),
            (reply.additional, self.additional if kind == "SRV" else []),
        ):
            sets: dict[tuple[str, str], list[str]] = {}
            for line in lines:
                owner, _, _, of, *_ = line.split(" ", 4)
                sets.setdefault((owner, of), []).append(line)
            for (owner, of), these in sets.items():
                data = [line.split(" ", 4)[4] for line in these]
                ttl = int(these[0].split(" ")[1])
                section.append(dns.rrset.from_text_list(f"{owner}.", ttl, "IN", of, data))


class Datagrams(asyncio.DatagramProtocol):
    def __init__(self, zone: Zone) -> None:
        self._zone = zone

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        reply = self._zone.answer(data, "udp")
        if reply is not None:
            self._transport.sendto(reply, address)


@contextlib.asynccontextmanager
async def name_server() -> AsyncIterator[Zone]:
    zone = Zone()
    (zone.port,) = find_free_ports(1)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (size,) = struct.unpack("!H", await reader.readexactly(2))
                reply = zone.answer(await reader.readexactly(size), "tcp")
                if reply is not None:
                    writer.write(struct.pack("!H", len(reply)) + reply)
        writer.close()

    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(
        lambda: Datagrams(zone), ("127.0.0.1", zone.port)
    )
    async with await asyncio.start_server(serve, "127.0.0.1", zone.port):
        yield zone
    transport.close()
