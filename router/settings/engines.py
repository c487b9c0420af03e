"""Settings of the engines: addresses, discovery, health, connections."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import ByteSize

from router.settings import fields
from router.settings.fields import MIB, TLS_SCHEME, Address, Lower, SettingsGroup, split_port


class EngineSettings(SettingsGroup):
    """Engines

    prefill: Prefill engines: http://HOST:PORT, https://HOST:PORT or HOST:PORT.
    decode: Decode engines.
    prefiller_hosts: Prefill engines as for vLLM's example proxies: HOST, HOST:PORT or a URL without
        a path.
    prefiller_ports: HTTP ports for prefill hosts without one: one for each, one for all, or several
        for one host.
    decoder_hosts: The same of decode engines.
    decoder_ports: HTTP ports for decode hosts without one.
    kv_protocol: How the engines move KV. auto: nixl (our engines, vLLM's NixlConnector), mooncake
        (vLLM's MooncakeConnector), sglang or trtllm, as their pages show. moriio: vLLM's
        MoRIIOConnector in WRITE mode. store: a KV store (LMCache, MooncakeStore). Engines of a file
        or of Kubernetes can differ.
    bootstrap_port: Port of the prefill engines' bootstrap servers, for mooncake.
    model_alias: Further names of models, as in claude-*=NAME: * is any text, NAME a model that
        engines serve. The first match counts.
    """

    prefill: fields.EngineUrls = ()
    decode: fields.EngineUrls = ()
    prefiller_hosts: fields.Hosts = ()
    prefiller_ports: fields.Ports = ()
    decoder_hosts: fields.Hosts = ()
    decoder_ports: fields.Ports = ()
    kv_protocol: fields.KvProtocol = "auto"
    bootstrap_port: fields.Port = 8998
    model_alias: fields.ModelAliasTexts = ()

    @property
    def prefill_engines(self) -> StaticEngines:
        hosts, ports = self.prefiller_hosts, self.prefiller_ports
        return StaticEngines("prefill", "prefiller", self.prefill, hosts, ports)

    @property
    def decode_engines(self) -> StaticEngines:
        return StaticEngines(
            "decode", "decoder", self.decode, self.decoder_hosts, self.decoder_ports
        )

    @property
    def prefillers(self) -> tuple[Address, ...]:
        return self.prefill_engines.addresses

    @property
    def decoders(self) -> tuple[Address, ...]:
        return self.decode_engines.addresses

    @property
    def over_tls(self) -> frozenset[Address]:
        both = (*self.prefill_engines.endpoints(), *self.decode_engines.endpoints())
        return frozenset(address for address, has_tls in both if has_tls)


class StaticEngines(NamedTuple):
    """The engines of one role that flags, variables or the YAML file list."""

    role: str
    flag: str
    """How the flags with hosts and ports begin."""
    urls: tuple[str, ...]
    hosts: tuple[str, ...]
    ports: tuple[int, ...]

    def endpoints(self) -> Iterator[tuple[Address, bool]]:
        """Yield each engine's address, and whether it is reached over TLS.

        Ports go to the hosts without a port: one each, or one to all; and one host gets several.
        """
        listed: list[tuple[str, int | None]] = [(url, None) for url in self.urls]
        listed += [(host, None) for host in self.hosts if _port_of(host) is not None]
        portless = [host for host in self.hosts if _port_of(host) is None]
        if len(portless) == 1:
            listed += [(portless[0], port) for port in self.ports]
        else:
            ports = self.ports * len(portless) if len(self.ports) == 1 else self.ports
            listed += zip(portless, ports, strict=False)
        for text, port in listed:
            host, own_port = split_port(text.removeprefix(TLS_SCHEME))
            yield Address(host.strip("[]"), own_port or port or 0), text.startswith(TLS_SCHEME)

    @property
    def addresses(self) -> tuple[Address, ...]:
        return tuple(address for address, _ in self.endpoints())

    def problems(self, is_required: bool) -> Iterator[str]:
        """Yield a line if hosts and ports do not fit. `is_required`: no other source has any."""
        portless = sum(_port_of(host) is None for host in self.hosts)
        if not self.urls and not self.hosts and not self.ports:
            if is_required:
                yield (
                    f"no {self.role} engine: --{self.role} http://HOST:PORT is missing "
                    f"(or --{self.flag}-hosts and --{self.flag}-ports)"
                )
        elif self.ports and not self.hosts:
            yield f"no {self.role} engine for --{self.flag}-ports: --{self.flag}-hosts is missing"
        elif portless and not self.ports:
            yield f"no port for the {self.role} engines: --{self.flag}-ports is missing"
        elif self.ports and not portless:
            yield f"--{self.flag}-ports: each host of --{self.flag}-hosts has a port already"
        elif portless > 1 and len(self.ports) not in (1, portless):
            yield (
                f"--{self.flag}-hosts names {portless} and --{self.flag}-ports {len(self.ports)}: "
                "give one port for each host, or one for all"
            )
        elif len(set(self.addresses)) < len(self.addresses):
            yield f"--{self.role}, --{self.flag}-hosts and --{self.flag}-ports name an engine twice"


def _port_of(host: str) -> int | None:
    return split_port(host.removeprefix(TLS_SCHEME))[1]


class DiscoverySettings(SettingsGroup):
    """Discovery

    engines_file: YAML file that lists engines. The router watches the file and follows its changes.
    prefiller_dns: DNS names of prefill engines: name:port (A, AAAA), or _http._tcp.name (SRV), with
        https:// before it for TLS. Every address is an engine; the TTL is respected.
    decoder_dns: The same of decode engines.
    kubernetes_prefill_selector: Label selector of the prefill engines' pods.
    kubernetes_decode_selector: Label selector of the decode engines' pods.
    kubernetes_namespace: Namespace of the engines' pods; by default the router's own.
    kubernetes_port: HTTP port of the pods, as a number or by its name.
    kubernetes_config: Kubeconfig file for a router outside the cluster. By default the pod's
        service account, else $KUBECONFIG, else ~/.kube/config.
    kubernetes_scheme: Scheme for pods without the annotation disagg-router.io/scheme.
    warm_up: Send a tiny request through each new pair of engines, so that no client waits for their
        handshake. lazy: for engines that arrive while the router runs. eager: for all, before other
        requests.
    """

    engines_file: Path | None = None
    prefiller_dns: fields.DnsNames = ()
    decoder_dns: fields.DnsNames = ()
    kubernetes_prefill_selector: fields.Selector | None = None
    kubernetes_decode_selector: fields.Selector | None = None
    kubernetes_namespace: fields.Namespace | None = None
    kubernetes_port: fields.PodPort = "8000"
    kubernetes_config: Path | None = None
    kubernetes_scheme: Annotated[Literal["http", "https"], Lower] = "http"
    warm_up: Literal["off", "lazy", "eager"] = "lazy"


class HealthSettings(SettingsGroup):
    """Health

    health_interval: Time between two probes of an engine (GET /health); longer in a fleet of over
        200, unless engines fall silent.
    health_timeout: Longest wait for the answer to a probe. SGLang's takes a second.
    health_failures: Failed probes in a row after which an engine is unhealthy. A refused connection
        makes it unhealthy at once.
    """

    health_interval: fields.Seconds = 1.0
    health_timeout: fields.Seconds = 3.0
    health_failures: fields.PositiveCount = 2


class ConnectionSettings(SettingsGroup):
    """Connections

    engine_idle_connections: Idle connections kept for each engine.
    engine_idle_age: How long an idle connection to an engine is kept. Choose less than the engines'
        keep-alive timeout (5 s in vLLM).
    max_answer_size: Largest answer that the router holds whole: prefill answers and errors.
    max_held_answers: Memory for answers above 224 KiB that are held whole, over all requests (else
        503). 0: no limit.
    """

    engine_idle_connections: fields.Count = 256
    engine_idle_age: fields.Seconds = 4.0
    max_answer_size: ByteSize = ByteSize(64 * MIB)
    max_held_answers: ByteSize = ByteSize(256 * MIB)

    def conflicts(self) -> Iterator[str]:
        if 0 < self.max_held_answers < self.max_answer_size:
            yield "--max-held-answers is less than --max-answer-size: an answer would not fit"
