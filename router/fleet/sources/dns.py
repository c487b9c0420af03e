"""Engines that are the addresses of a DNS name, as those of a headless Service are.

    decode.example:8200         each address (A; AAAA where there is no A) is one, at that port
    _http._tcp.decode.example   each target (SRV) is one, at its own port; of several priorities
                                the first, and weights count for nothing

A name is asked again when its answer is as old as its TTL allows. A resolver in trouble says
nothing about engines. One that says that there are none may be believed too soon: a Service that is
made anew, or a zone that is loaded, looks the same for a moment. So it has to say it several times;
those who are really gone are found by probes meanwhile.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import NamedTuple

import dns.asyncresolver
import dns.exception
import dns.name
import dns.rdatatype
import dns.resolver

from router.fleet.engine_spec import EngineRole, EngineSpec, ListedEngine
from router.fleet.sources.background import aside
from router.fleet.sources.backoff import Backoff
from router.fleet.sources.source import SourceReport, line_of
from router.settings import TLS_SCHEME, Address, canonical

MakeResolver = Callable[[], dns.asyncresolver.Resolver]
# Seconds for all questions of one look together.
PATIENCE = 10.0
# Bounds of a TTL in seconds: 0 is no reason to ask all the time, nor a week to be a week behind.
SHORTEST, LONGEST = 1.0, 300.0
# How often in a row, and how many seconds apart, a name has to be empty.
CONFIRMATIONS = 3
DOUBT = 2.0
EMPTY_AGE = 5.0
# Questions at a time, where an answer does not bring its targets' addresses.
AT_ONCE = 16


class DnsLookup(NamedTuple):
    """`ttl`: seconds that it may be believed."""

    addresses: frozenset[Address]
    ttl: float


class HostAddresses(NamedTuple):
    hosts: Sequence[str]
    ttl: float


class DnsSource:
    """The resolver is made anew each time: what it is configured with may have changed."""

    def __init__(
        self,
        role: EngineRole,
        name: str,
        make_resolver: MakeResolver = dns.asyncresolver.Resolver,
        doubt: float = DOUBT,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.name = f"dns:{role}:{name}"
        self.first = SourceReport()
        self._role = role
        self._asked = name.removeprefix(TLS_SCHEME)
        self._tls = name.startswith(TLS_SCHEME)
        self._make_resolver = make_resolver
        self._doubt = doubt
        self._backoff = Backoff(chance)
        self._has_engines = False
        self._empties = 0

    async def watch(self) -> AsyncGenerator[SourceReport, None]:
        while True:
            report, pause = await self._look()
            yield report
            await asyncio.sleep(pause)

    async def _look(self) -> tuple[SourceReport, float]:
        """And the seconds until the next one."""
        try:
            found = await aside(self._look_up)
        except TimeoutError:
            return self._troubled(f"no answer within {PATIENCE:g} s")
        except (dns.exception.DNSException, OSError) as error:
            return self._troubled(line_of(error))
        self._backoff.reset()
        self._empties = 0 if found.addresses else self._empties + 1
        if self._has_engines and 0 < self._empties < CONFIRMATIONS:
            text = f"lists nobody, {self._empties} of {CONFIRMATIONS} times until it is believed"
            return SourceReport(None, text), self._doubt
        self._has_engines = bool(found.addresses)
        # In an order that stays: resolvers shuffle.
        listed = tuple(
            ListedEngine(EngineSpec(self._role, at, tls=self._tls))
            for at in sorted(found.addresses)
        )
        return SourceReport(listed), min(max(found.ttl, SHORTEST), LONGEST)

    async def _look_up(self) -> DnsLookup:
        """A thousand addresses take dnspython a tenth of a second to read: not in this loop."""
        async with asyncio.timeout(PATIENCE):
            return await look_up(self._make_resolver(), self._asked)

    def _troubled(self, text: str) -> tuple[SourceReport, float]:
        """Who says nothing does not confirm anything."""
        self._empties = 0
        return SourceReport(None, text), self._backoff.next()


async def look_up(resolver: dns.asyncresolver.Resolver, name: str) -> DnsLookup:
    """Raises DNSException, OSError."""
    if name.startswith("_"):
        return await _services(resolver, name)
    host, _, port = name.rpartition(":")
    hosts, ttl = await _hosts(resolver, host)
    return DnsLookup(frozenset(Address(canonical(host), int(port)) for host in hosts), ttl)


async def _services(resolver: dns.asyncresolver.Resolver, name: str) -> DnsLookup:
    answer = await _ask(resolver, name, "SRV")
    if answer is None:
        return DnsLookup(frozenset(), EMPTY_AGE)
    foremost = min(record.priority for record in answer)
    targets = [(r.target, r.port) for r in answer if r.priority == foremost]
    known = {target: _brought(answer, target) for target, _ in targets}
    missing = [target for target, (hosts, _) in known.items() if not hosts]
    # The root is no host: "decidedly not available", as RFC 2782 has it.
    known |= await _hosts_of(resolver, [name for name in missing if name != dns.name.root])
    addresses = {
        Address(canonical(host), port) for target, port in targets for host in known[target].hosts
    }
    return DnsLookup(frozenset(addresses), min([_ttl(answer), *(ttl for _, ttl in known.values())]))


async def _hosts_of(
    resolver: dns.asyncresolver.Resolver, names: Iterable[dns.name.Name]
) -> dict[dns.name.Name, HostAddresses]:
    room, found = asyncio.Semaphore(AT_ONCE), {}

    async def ask(name: dns.name.Name) -> None:
        async with room:
            found[name] = await _hosts(resolver, name)

    try:
        async with asyncio.TaskGroup() as group:
            for name in names:
                group.create_task(ask(name))
    except ExceptionGroup as several:
        raise several.exceptions[0] from None
    return found


async def _hosts(resolver: dns.asyncresolver.Resolver, name: dns.name.Name | str) -> HostAddresses:
    """An engine that has addresses of both families is one engine, so only one family counts."""
    for kind in ("A", "AAAA"):
        if answer := await _ask(resolver, name, kind):
            return HostAddresses([record.address for record in answer], _ttl(answer))
    return HostAddresses([], EMPTY_AGE)


async def _ask(
    resolver: dns.asyncresolver.Resolver, name: dns.name.Name | str, kind: str
) -> dns.resolver.Answer | None:
    """None where the name is said to have no such record, or not to be."""
    try:
        answer = await resolver.resolve(name, kind, raise_on_no_answer=False, search=True)
    except dns.resolver.NXDOMAIN:
        return None
    return answer or None


def _brought(answer: dns.resolver.Answer, target: dns.name.Name) -> HostAddresses:
    """The target's addresses, as far as the answer has them."""
    for kind in (dns.rdatatype.A, dns.rdatatype.AAAA):
        for records in answer.response.additional:
            if records.name == target and records.rdtype == kind:
                return HostAddresses([record.address for record in records], records.ttl)
    return HostAddresses([], LONGEST)


def _ttl(answer: dns.resolver.Answer) -> float:
    """The least on the way, aliases included."""
    return float(answer.chaining_result.minimum_ttl)
