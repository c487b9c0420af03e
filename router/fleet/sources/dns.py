"""Engines that are the addresses of a DNS name, such as those of a headless Service.

    decode.example:8200         each address (A; AAAA if there is no A) is an engine at that port
    _http._tcp.decode.example   each target (SRV) is an engine at its own port; only the first
                                priority counts, and weights are ignored

A name is resolved again when its answer's TTL is over. A failing resolver is no evidence about the
engines. An answer without any addresses may be temporary: a Service that is created anew or a zone
that is being loaded looks the same. So it counts only after several such answers; probes find the
engines that are really gone meanwhile.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import NamedTuple

import dns.asyncresolver
import dns.exception
import dns.name
import dns.rdatatype
import dns.resolver

from router.common.daemon_thread import call_in_daemon_thread
from router.fleet.engine import EngineRole, EngineSpec
from router.fleet.sources.source import Backoff, SourceReport, one_line
from router.settings import TLS_SCHEME, Address, canonical

MakeResolver = Callable[[], dns.asyncresolver.Resolver]
# For all queries of one look together.
LOOKUP_TIMEOUT_S = 10.0
# Bounds of a TTL: neither query all the time nor be a week behind.
MIN_TTL_S, MAX_TTL_S = 1.0, 300.0
# How many empty answers in a row count, how far they are apart, and the TTL of an empty answer.
CONFIRMATIONS = 3
CONFIRM_INTERVAL_S = 2.0
EMPTY_TTL_S = 5.0
# Simultaneous queries for targets whose addresses are not in the answer.
MAX_QUERIES = 16


class DnsLookup(NamedTuple):
    """`ttl` is the seconds for which the addresses are valid."""

    addresses: frozenset[Address]
    ttl: float


class HostAddresses(NamedTuple):
    hosts: Sequence[str]
    ttl: float


class DnsSource:
    """The engines of one name. A resolver is made for each look, since its configuration may have
    changed."""

    def __init__(
        self,
        role: EngineRole,
        name: str,
        make_resolver: MakeResolver = dns.asyncresolver.Resolver,
        confirm_interval: float = CONFIRM_INTERVAL_S,
        random_share: Callable[[], float] = random.random,
    ) -> None:
        self.name = f"dns:{role}:{name}"
        self.first = SourceReport()
        self._role = role
        self._dns_name = name.removeprefix(TLS_SCHEME)
        self._tls = name.startswith(TLS_SCHEME)
        self._make_resolver = make_resolver
        self._confirm_interval = confirm_interval
        self._backoff = Backoff(random_share)
        self._has_engines = False
        self._empty_answers = 0

    async def watch(self) -> AsyncGenerator[SourceReport, None]:
        while True:
            report, pause = await self.look()
            yield report
            await asyncio.sleep(pause)

    async def look(self) -> tuple[SourceReport, float]:
        """Return a report and the seconds until the next look."""
        try:
            found = await self._look_up()
        except TimeoutError:
            return self._failed(f"no answer within {LOOKUP_TIMEOUT_S:g} s")
        except (dns.exception.DNSException, OSError) as error:
            return self._failed(one_line(error))
        self._backoff.reset()
        self._empty_answers = 0 if found.addresses else self._empty_answers + 1
        if self._has_engines and 0 < self._empty_answers < CONFIRMATIONS:
            times = f"{self._empty_answers} of {CONFIRMATIONS}"
            text = f"lists no engines ({times} answers before the router removes the engines)"
            return SourceReport(None, text), self._confirm_interval
        self._has_engines = bool(found.addresses)
        # Sorted, since resolvers shuffle.
        listed = [EngineSpec(self._role, at, tls=self._tls) for at in sorted(found.addresses)]
        pause = min(max(found.ttl, MIN_TTL_S), MAX_TTL_S)
        problem = "" if listed else f"{self._dns_name} does not exist in DNS, or has no addresses"
        return SourceReport(tuple(listed), problem), pause

    async def _look_up(self) -> DnsLookup:
        """Look up in a thread and an event loop of its own: dnspython takes a tenth of a second to
        parse a thousand addresses."""

        async def work() -> DnsLookup:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                return await look_up(self._make_resolver(), self._dns_name)

        return await call_in_daemon_thread(lambda: asyncio.run(work()))

    def _failed(self, text: str) -> tuple[SourceReport, float]:
        """A failure confirms no earlier empty answer."""
        self._empty_answers = 0
        return SourceReport(None, text), self._backoff.next()


async def look_up(resolver: dns.asyncresolver.Resolver, name: str) -> DnsLookup:
    """Resolve `host:port` or an SRV name. Raises DNSException, OSError."""
    if name.startswith("_"):
        return await _look_up_service(resolver, name)
    host, _, port = name.rpartition(":")
    hosts, ttl = await _look_up_host(resolver, host)
    return DnsLookup(frozenset(Address(canonical(host), int(port)) for host in hosts), ttl)


async def _look_up_service(resolver: dns.asyncresolver.Resolver, name: str) -> DnsLookup:
    answer = await _query(resolver, name, "SRV")
    if answer is None:
        return DnsLookup(frozenset(), EMPTY_TTL_S)
    first_priority = min(record.priority for record in answer)
    targets = [(r.target, r.port) for r in answer if r.priority == first_priority]
    known = {target: _addresses_in(answer, target) for target, _ in targets}
    # The root as target means "decidedly not available" (RFC 2782).
    missing = [name for name, (hosts, _) in known.items() if not hosts and name != dns.name.root]
    slots = asyncio.Semaphore(MAX_QUERIES)

    async def look_up_target(name: dns.name.Name) -> HostAddresses:
        async with slots:
            return await _look_up_host(resolver, name)

    known |= zip(missing, await asyncio.gather(*map(look_up_target, missing)), strict=True)
    addresses = {
        Address(canonical(host), port) for target, port in targets for host in known[target].hosts
    }
    return DnsLookup(frozenset(addresses), min([_ttl(answer), *(ttl for _, ttl in known.values())]))


async def _look_up_host(
    resolver: dns.asyncresolver.Resolver, name: dns.name.Name | str
) -> HostAddresses:
    """Return the addresses of one family: an engine that has both is one engine."""
    for kind in ("A", "AAAA"):
        if answer := await _query(resolver, name, kind):
            return HostAddresses([record.address for record in answer], _ttl(answer))
    return HostAddresses([], EMPTY_TTL_S)


async def _query(
    resolver: dns.asyncresolver.Resolver, name: dns.name.Name | str, kind: str
) -> dns.resolver.Answer | None:
    """Return None if the name does not exist or has no such record."""
    try:
        answer = await resolver.resolve(name, kind, raise_on_no_answer=False, search=True)
    except dns.resolver.NXDOMAIN:
        return None
    return answer or None


def _addresses_in(answer: dns.resolver.Answer, target: dns.name.Name) -> HostAddresses:
    """Return the target's addresses if the SRV answer brings them."""
    for kind in (dns.rdatatype.A, dns.rdatatype.AAAA):
        for records in answer.response.additional:
            if records.name == target and records.rdtype == kind:
                return HostAddresses([record.address for record in records], records.ttl)
    return HostAddresses([], MAX_TTL_S)


def _ttl(answer: dns.resolver.Answer) -> float:
    """Return the least TTL on the way, aliases included."""
    return float(answer.chaining_result.minimum_ttl)
