"""Makes the sources that the settings name. A source's dependencies are imported when needed."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterable, Iterator
from pathlib import Path

from router.fleet.engine import EngineRole, EngineSpec
from router.fleet.sources.file import FileSource
from router.fleet.sources.source import EngineSource, SavedListing, SourceReport
from router.settings import Address, Settings, SettingsError, canonical


class StaticSource:
    """The engines of the flags, which never change."""

    name = "flags"

    def __init__(self, settings: Settings) -> None:
        prefillers, decoders = _canonical(settings.prefillers), _canonical(settings.decoders)
        roles = dict.fromkeys(prefillers, EngineRole.PREFILL)
        for address in decoders:  # an engine that is named for both roles is one engine
            roles[address] = EngineRole.BOTH if address in roles else EngineRole.DECODE
        tls = frozenset(_canonical(settings.over_tls))
        listed = [EngineSpec(role, at, tls=at in tls) for at, role in roles.items()]
        self.first = SourceReport(tuple(listed))

    async def watch(self) -> AsyncGenerator[SourceReport, None]:
        yield self.first


def _canonical(addresses: Iterable[Address]) -> list[Address]:
    return [Address(canonical(host), port) for host, port in addresses]


def make_sources(settings: Settings, shared: Path | None = None) -> list[EngineSource]:
    """Return the sources in the order of precedence. `shared` is a folder of several processes with
    the same settings, in which their lists are saved. Raises SettingsError."""
    sources: list[EngineSource] = []
    if settings.prefillers or settings.decoders:
        sources.append(StaticSource(settings))
    if settings.engines_file is not None:
        sources.append(FileSource(settings.engines_file))
    sources += _dns_sources(settings)
    sources += _kubernetes_sources(settings)
    if shared is None:
        return sources
    return [SavedListing(one, shared / f"source-{n}.json") for n, one in enumerate(sources)]


def check_sources(settings: Settings) -> None:
    """Check the sources at start. An engines file that cannot be used is then an error like any
    other in the settings; later it is only a problem to report. Raises SettingsError."""
    problems = [source.first.problem for source in make_sources(settings)]
    if found := [f"--engines-file {problem}" for problem in problems if problem]:
        raise SettingsError(found)


def describe_sources(settings: Settings) -> list[str]:
    """Return where engines are discovered, apart from the flags."""
    found = [f"file {settings.engines_file}"] if settings.engines_file else []
    if names := [*settings.prefiller_dns, *settings.decoder_dns]:
        found.append(f"DNS {' '.join(dict.fromkeys(names))}")
    if settings.kubernetes_prefill_selector or settings.kubernetes_decode_selector:
        found.append("Kubernetes")
    return found


def _dns_sources(settings: Settings) -> Iterator[EngineSource]:
    if not (settings.prefiller_dns or settings.decoder_dns):
        return
    with _extra("dns", "--prefiller-dns and --decoder-dns"):
        from router.fleet.sources.dns import DnsSource
    for role, names in (
        (EngineRole.PREFILL, settings.prefiller_dns),
        (EngineRole.DECODE, settings.decoder_dns),
    ):
        for name in dict.fromkeys(names):
            yield DnsSource(role, name)


def _kubernetes_sources(settings: Settings) -> Iterator[EngineSource]:
    selectors = {
        EngineRole.PREFILL: settings.kubernetes_prefill_selector,
        EngineRole.DECODE: settings.kubernetes_decode_selector,
    }
    if not any(selectors.values()):
        return
    with _extra("kubernetes", "--kubernetes-...-selector"):
        from router.fleet.sources.kubernetes import KubernetesSource
        from router.fleet.sources.pod_api import PodApi
    for role, selector in selectors.items():
        if selector is not None:
            api = PodApi(settings.kubernetes_config, settings.kubernetes_namespace, selector)
            scheme = settings.kubernetes_scheme
            yield KubernetesSource(role, settings.kubernetes_port, api, scheme=scheme)


@contextlib.contextmanager
def _extra(extra: str, flags: str) -> Iterator[None]:
    """Import what an extra brings. Raises SettingsError if it is not installed."""
    try:
        yield
    except ImportError as error:
        problem = f"{flags} need a package that is not installed ({error}): "
        raise SettingsError([problem + f"in a checkout, pip install '.[{extra}]'"]) from None
