"""The sources that the settings name. What a source needs is imported when it is wanted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from router.fleet.engine_spec import EngineRole
from router.fleet.sources.saved_listing import SavedListing
from router.fleet.sources.source import EngineSource
from router.settings import Settings, SettingsError


def make_sources(settings: Settings, shared: Path | None = None) -> list[EngineSource]:
    """Those that come first count more where two contradict each other. What they list is
    remembered in the folder `shared` of several processes with the same settings. Raises
    SettingsError."""
    sources = [
        *_flags(settings),
        *_file(settings),
        *_dns(settings),
        *_kubernetes(settings),
    ]
    if shared is None:
        return sources
    return [SavedListing(one, shared / f"source-{n}.json") for n, one in enumerate(sources)]


def check_sources(settings: Settings) -> None:
    """At start, an engines file that cannot be used is a mistake in the settings like any other:
    later it is only trouble, since there are engines to go on with. Raises SettingsError."""
    troubles = [source.first.problem for source in make_sources(settings)]
    if problems := [f"--engines-file {trouble}" for trouble in troubles if trouble]:
        raise SettingsError(problems)


def describe_sources(settings: Settings) -> list[str]:
    """Where engines are looked for besides the flags."""
    found = [f"file {settings.engines_file}"] if settings.engines_file else []
    if names := [*settings.prefiller_dns, *settings.decoder_dns]:
        found.append(f"DNS {' '.join(dict.fromkeys(names))}")
    if settings.kubernetes_prefill_selector or settings.kubernetes_decode_selector:
        found.append("Kubernetes")
    return found


def _flags(settings: Settings) -> Iterator[EngineSource]:
    from router.fleet.sources.static import StaticSource

    if settings.prefillers or settings.decoders:
        yield StaticSource(settings)


def _file(settings: Settings) -> Iterator[EngineSource]:
    from router.fleet.sources.file import FileSource

    if settings.engines_file is not None:
        yield FileSource(settings.engines_file)


def _dns(settings: Settings) -> Iterator[EngineSource]:
    if not (settings.prefiller_dns or settings.decoder_dns):
        return
    try:
        from router.fleet.sources.dns import DnsSource
    except ImportError as error:
        raise _missing("--prefiller-dns and --decoder-dns", "dns", error) from None
    for role, names in (
        (EngineRole.PREFILL, settings.prefiller_dns),
        (EngineRole.DECODE, settings.decoder_dns),
    ):
        for name in dict.fromkeys(names):
            yield DnsSource(role, name)


def _kubernetes(settings: Settings) -> Iterator[EngineSource]:
    selectors = {
        EngineRole.PREFILL: settings.kubernetes_prefill_selector,
        EngineRole.DECODE: settings.kubernetes_decode_selector,
    }
    if not any(selectors.values()):
        return
    try:
        from router.fleet.sources.kubernetes import KubernetesSource
        from router.fleet.sources.pod_api import PodApi
    except ImportError as error:
        raise _missing("--kubernetes-...-selector", "kubernetes", error) from None
    for role, selector in selectors.items():
        if selector is not None:
            api = PodApi(settings.kubernetes_config, settings.kubernetes_namespace, selector)
            scheme = settings.kubernetes_scheme
            yield KubernetesSource(role, settings.kubernetes_port, api, scheme=scheme)


def _missing(flags: str, extra: str, error: ImportError) -> SettingsError:
    return SettingsError(
        [f"{flags} need what is not installed ({error}): pip install 'disagg-router[{extra}]'"]
    )
