"""The engines of the flags: these and no others, as long as the router runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable

from router.fleet.engine_spec import EngineRole, EngineSpec, ListedEngine
from router.fleet.sources.source import SourceReport
from router.settings import Address, Settings, canonical


class StaticSource:
    name = "flags"

    def __init__(self, settings: Settings) -> None:
        """An engine that is named for both roles is one engine."""
        prefillers, decoders = _known(settings.prefillers), _known(settings.decoders)
        roles = dict.fromkeys(prefillers, EngineRole.PREFILL)
        for address in decoders:
            roles[address] = EngineRole.BOTH if address in roles else EngineRole.DECODE
        tls = frozenset(_known(settings.over_tls))
        listed = (ListedEngine(EngineSpec(role, at, tls=at in tls)) for at, role in roles.items())
        self.first = SourceReport(tuple(listed))

    async def watch(self) -> AsyncGenerator[SourceReport, None]:
        yield self.first


def _known(addresses: Iterable[Address]) -> list[Address]:
    return [Address(canonical(host), port) for host, port in addresses]
