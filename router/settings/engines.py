"""Settings of the engines: addresses, discovery, health, connections."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ByteSize

from router.settings.fields import (
    MIB,
    TLS_SCHEME,
    Address,
    Count,
    DnsNames,
    Hosts,
    Lower,
    ModelAliasTexts,
    Namespace,
    PodPort,
    Ports,
    PositiveCount,
    Seconds,
    Selector,
    SettingsGroup,
)


class EngineSettings(SettingsGroup):
    """Engines

    prefiller_hosts: Hosts of the prefill engines: names, IPv4 or IPv6 addresses. Put https://
        before a host that is reached over TLS.
    prefiller_ports: HTTP ports of the prefill engines: one for each host, or one for all.
    decoder_hosts: Hosts of the decode engines.
    decoder_ports: HTTP ports of the decode engines: one for each host, or one for all.
    model_alias: Further names of models, as in claude-*=NAME: * is any text, NAME is a model that
        engines serve. The first match counts; names that engines serve are no aliases.
    """

    prefiller_hosts: Hosts = ()
    prefiller_ports: Ports = ()
    decoder_hosts: Hosts = ()
    decoder_ports: Ports = ()
    model_alias: ModelAliasTexts = ()

    @property
    def prefillers(self) -> tuple[Address, ...]:
        return pair_addresses(self.prefiller_hosts, self.prefiller_ports)

    @property
    def decoders(self) -> tuple[Address, ...]:
        return pair_addresses(self.decoder_hosts, self.decoder_ports)

    @property
    def over_tls(self) -> frozenset[Address]:
        hosts = (*self.prefiller_hosts, *self.decoder_hosts)
        pairs = zip(hosts, (*self.prefillers, *self.decoders), strict=True)
        return frozenset(address for host, address in pairs if host.startswith(TLS_SCHEME))


def pair_addresses(hosts: tuple[str, ...], ports: tuple[int, ...]) -> tuple[Address, ...]:
    """Return one address for each host; a single port is the port of every host."""
    ports = ports * len(hosts) if len(ports) == 1 else ports
    return tuple(map(Address, (host.removeprefix(TLS_SCHEME) for host in hosts), ports))


def pairing_problems(role: str, hosts: tuple[str, ...], ports: tuple[int, ...]) -> Iterator[str]:
    """Yield a line if hosts and ports of a role do not fit."""
    if not hosts or not ports:
        missing = "hosts" if not hosts else "ports"
        yield f"no {role} engine: --{role}-{missing} is missing"
    elif len(ports) not in (1, len(hosts)):
        yield (
            f"--{role}-hosts names {len(hosts)} and --{role}-ports {len(ports)}: "
            "give one port for each host, or one for all"
        )
    elif len(set(pair_addresses(hosts, ports))) < len(hosts):
        yield f"--{role}-hosts and --{role}-ports name an engine twice"


class DiscoverySettings(SettingsGroup):
    """Discovery

    engines_file: YAML file that lists engines. The router watches the file and adds and removes
        engines as the list changes.
    prefiller_dns: DNS names of prefill engines: name:port (A, AAAA), or _http._tcp.name (SRV).
        Every address is an engine. Put https:// before a name for TLS. The router resolves a name
        again when its TTL ends.
    decoder_dns: DNS names of decode engines, as above.
    kubernetes_prefill_selector: Label selector of the prefill engines' pods. Labels and annotations
        of a pod can add details.
    kubernetes_decode_selector: Label selector of the decode engines' pods.
    kubernetes_namespace: Namespace of the engines' pods. If not set: the router's own namespace.
    kubernetes_port: HTTP port of the pods: a number, or the name that pods give the port.
    kubernetes_config: Kubeconfig file for a router outside the cluster. If not set: the pod's
        service account, else $KUBECONFIG, else ~/.kube/config.
    kubernetes_scheme: Scheme for pods without the annotation disagg-router.io/scheme.
    warm_up: Send one tiny request through each new pair of engines, so that no user waits for the
        engines' handshake. lazy: for engines that arrive while the router runs. eager: for all
        engines, and new engines get no other request before.
    """

    engines_file: Path | None = None
    prefiller_dns: DnsNames = ()
    decoder_dns: DnsNames = ()
    kubernetes_prefill_selector: Selector | None = None
    kubernetes_decode_selector: Selector | None = None
    kubernetes_namespace: Namespace | None = None
    kubernetes_port: PodPort = "8000"
    kubernetes_config: Path | None = None
    kubernetes_scheme: Annotated[Literal["http", "https"], Lower] = "http"
    warm_up: Literal["off", "lazy", "eager"] = "lazy"


class HealthSettings(SettingsGroup):
    """Health

    health_interval: Time between two probes of an engine (GET /health).
    health_timeout: Longest wait for the answer to a probe.
    health_failures: Number of failed probes in a row after which an engine is unhealthy. A refused
        connection makes it unhealthy at once.
    """

    health_interval: Seconds = 1.0
    health_timeout: Seconds = 1.0
    health_failures: PositiveCount = 2


class ConnectionSettings(SettingsGroup):
    """Connections

    engine_idle_connections: Idle connections kept for each engine.
    engine_idle_age: How long an idle connection to an engine is kept. Choose less than the engine's
        own keep- alive (5 s in vLLM).
    max_answer_size: Largest answer that the router holds whole: prefill answers and errors.
    max_held_answers: Memory for large answers that are held whole, over all requests. An answer
        beyond the limit gets status 503. Answers up to 256 KiB do not count. 0: no limit.
    """

    engine_idle_connections: Count = 256
    engine_idle_age: Seconds = 4.0
    max_answer_size: ByteSize = ByteSize(64 * MIB)
    max_held_answers: ByteSize = ByteSize(256 * MIB)

    def conflicts(self) -> Iterator[str]:
        if 0 < self.max_held_answers < self.max_answer_size:
            yield "--max-held-answers is less than --max-answer-size: an answer would not fit"
