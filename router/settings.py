"""Every setting, once: flags, DISAGG_ROUTER_* variables and one YAML file, under the same names.

A flag wins over a variable, a variable over the file, the file over the default.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from router.common.tls import Pair, Secured, asking, serving

PREFIX = "DISAGG_ROUTER_"
# A Kubernetes Service called disagg-router puts DISAGG_ROUTER_PORT=tcp://10.0.0.1:8000 into every
# pod of its namespace.
SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://")
LONGEST = 366 * 86400.0
STORES = re.compile(r"memory|off|rediss?(\+cluster|\+sentinel)?://.+")
SECRETS = frozenset(
    (
        "conversation_store",
        "conversation_store_password",
        "conversation_store_key",
        "key_limits_store",
        "engine_api_key",
        "admin_token",
        "ui_token",
    )
)
# What the command `drain` reads, and no router does.
ADMIN_URL = "DISAGG_ROUTER_ADMIN_URL"
SHORTEST_KEY = 16
# Before an engine's host, or the name of some.
TLS = "https://"
# The second of each means nothing without the first.
TLS_NEEDS = (
    ("tls_certfile", "tls_keyfile"),
    ("tls_certfile", "tls_client_ca"),
    ("engine_certfile", "engine_keyfile"),
)
SHORTEST_HEARTBEAT = 0.1
IDS = (
    "conversation_id",
    "x-conversation-id",
    "x-session-id",
    "session_id",
    "x-session-affinity",
    "x-correlation-id",
)
NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
GROUP = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
HEAVIEST = 1e6
TOKEN = re.compile(r"[\x21-\x7e]{1,4096}")
ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,30}://[A-Za-z0-9._\[\]:-]{1,259}")
SELECTOR = re.compile(r"[A-Za-z0-9!(][A-Za-z0-9_./,=!() -]{0,1023}")
NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
PORT_NAME = re.compile(r"(?=.*[a-z])[a-z0-9]([a-z0-9-]{0,13}[a-z0-9])?")
HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,251}[A-Za-z0-9_.])?")


class SettingsError(Exception):
    """Settings that cannot be used; `problems` has one line for each reason."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class BrokenFileError(SettingsError):
    """A file that is watched while a router runs, and cannot be used now: it may be soon."""


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _items(value: object) -> list[object]:
    """A list however it was given: as such, as JSON, or with commas or spaces between."""
    if isinstance(value, str):
        return _words(value)
    if isinstance(value, list | tuple):
        return [item for part in value for item in _items(part)]
    return [value]


def _words(text: str) -> list[object]:
    if text.lstrip().startswith("["):
        try:
            return list(json.loads(text))
        except ValueError:
            pass  # "[::1]" is a host, not a list
    return list(text.replace(",", " ").split())


def _host(value: object) -> object:
    if not isinstance(value, str):
        return value
    host = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    if not (_is_ipv6(host) if ":" in host else HOST_NAME.fullmatch(host)):
        raise ValueError("not a host: give a name, IPv4 or IPv6, without scheme or port")
    return host


def _engine_host(value: object) -> object:
    """It may say that the engine is reached over TLS."""
    if isinstance(value, str) and value.startswith(TLS):
        return f"{TLS}{_host(value.removeprefix(TLS))}"
    return _host(value)


def _is_ipv6(text: str) -> bool:
    try:
        _ipv6(text)
    except ValueError:
        return False
    return True


def _ipv6(text: str) -> ipaddress.IPv6Address:
    """Raises ValueError. The library takes any text for a zone, also quotes and line breaks."""
    address = ipaddress.IPv6Address(text)
    if address.scope_id is not None and not HOST_NAME.fullmatch(address.scope_id):
        raise ValueError(f"{text!r} has no interface's name behind its address")
    return address


def canonical(host: str) -> str:
    """One spelling of each host, so that an engine which two sources list is one. Raises ValueError
    for an IPv6 address that is none."""
    return str(_ipv6(host)) if ":" in host else host.lower()


def is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 6 and 0 < int(text) < 65536


def _dns_name(value: object) -> object:
    if not isinstance(value, str):
        return value
    plain = value.removeprefix(TLS)
    name, _, port = plain.rpartition(":")
    if plain.startswith("_"):
        if HOST_NAME.fullmatch(plain):
            return value
    elif HOST_NAME.fullmatch(name) and is_port(port):
        if not _is_ipv4(name):
            return value
        raise ValueError("an address needs no DNS: give it to the -hosts and -ports")
    raise ValueError("not a DNS name: name:port for A and AAAA, _http._tcp.name for SRV")


def _is_ipv4(text: str) -> bool:
    try:
        ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return True


def _selector(value: object) -> object:
    if isinstance(value, str) and not SELECTOR.fullmatch(value):
        raise ValueError("not a label selector, as in llm-d.ai/role=prefill,app=vllm")
    return value


def _namespace(value: object) -> object:
    if isinstance(value, str) and not NAMESPACE.fullmatch(value):
        raise ValueError("not the name of a namespace")
    return value


def _port_of_pod(value: object) -> object:
    text = str(value)
    if not is_port(text) and not PORT_NAME.fullmatch(text):
        raise ValueError("neither a port nor the name of one")
    return text


def _store(value: object) -> object:
    if isinstance(value, str) and not STORES.fullmatch(value):
        raise ValueError(
            "not a store: memory, off, or redis://, rediss://, redis+cluster://, redis+sentinel://"
        )
    return value


def _limits_store(value: object) -> object:
    if value == "off":
        raise ValueError("limits are counted somewhere: memory, or a Redis URL")
    return _store(value)


def _credential(value: object) -> object:
    """What is wrong with it is told without it."""
    if isinstance(value, str):
        check_credential(value)
    return value


def check_credential(text: str) -> None:
    """Raises ValueError."""
    if not TOKEN.fullmatch(text):
        raise ValueError("not a key: ASCII without spaces")


def _keys(value: object) -> object:
    """Text that holds keys, one a line. What is wrong with it is told without them."""
    if isinstance(value, str):
        keys_in(value)
    return value


def keys_in(text: str) -> list[bytes]:
    """The first signs, all verify. Raises ValueError."""
    keys = [line.strip().encode() for line in text.splitlines() if line.strip()]
    if not keys:
        raise ValueError("no key: give one line of text, as from openssl rand -base64 32")
    for number, key in enumerate(keys, 1):
        if len(key) < SHORTEST_KEY:
            raise ValueError(
                f"key {number} is too short with {len(key)} bytes: at least {SHORTEST_KEY}, better "
                "those of openssl rand -base64 32"
            )
    return keys


def _heartbeat(seconds: float) -> float:
    if 0 < seconds < SHORTEST_HEARTBEAT:
        raise ValueError(f"at least {SHORTEST_HEARTBEAT:g} seconds, or 0 for none")
    return seconds


def _token(value: object) -> object:
    """What is wrong with it is told without it."""
    if isinstance(value, str):
        check_token(value)
    return value


def check_token(text: str) -> None:
    """Raises ValueError."""
    if not TOKEN.fullmatch(text):
        raise ValueError("not a token: ASCII without spaces, as from openssl rand -hex 32")
    if len(text) < SHORTEST_KEY:
        raise ValueError(
            f"too short with {len(text)} characters: at least {SHORTEST_KEY}, better those of "
            "openssl rand -hex 32"
        )


def _weights(value: object) -> object:
    """group=weight, each; a YAML file may have a mapping."""
    if isinstance(value, dict):
        value = [f"{group}={weight}" for group, weight in value.items()]
    return _items(value)


def _weight(value: object) -> object:
    text = str(value)
    group, _, number = text.partition("=")
    try:
        weight = float(number) if number.isascii() and "_" not in number else -1.0
    except ValueError:
        weight = -1.0
    if not GROUP.fullmatch(group) or not 0 <= weight <= HEAVIEST:
        raise ValueError(f"not as in blue=9: a group, and a number from 0 to {HEAVIEST:g}")
    return text


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it. A name but localhost may mean anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _name(value: object) -> object:
    if isinstance(value, str) and not NAME.fullmatch(value):
        raise ValueError("not the name of a header or of a field")
    return value


def _web_origin(value: object) -> object:
    """In the one spelling that browsers send."""
    if not isinstance(value, str) or not (value == "*" or ORIGIN.fullmatch(value)):
        raise ValueError("not an origin, as in https://chat.example or http://localhost:3000")
    return value.lower()


Host = Annotated[str, BeforeValidator(_host)]
Origin = Annotated[str, BeforeValidator(_web_origin)]
Name = Annotated[str, BeforeValidator(_name)]
Names = Annotated[tuple[Name, ...], BeforeValidator(_items)]
Share = Annotated[float, Field(ge=0, le=1)]
Port = Annotated[int, Field(ge=1, le=65535)]
EngineHost = Annotated[str, BeforeValidator(_engine_host)]
Hosts = Annotated[tuple[EngineHost, ...], BeforeValidator(_items)]
Ports = Annotated[tuple[Port, ...], BeforeValidator(_items)]
DnsName = Annotated[str, BeforeValidator(_dns_name)]
DnsNames = Annotated[tuple[DnsName, ...], BeforeValidator(_items)]
Selector = Annotated[str, BeforeValidator(_selector)]
Namespace = Annotated[str, BeforeValidator(_namespace)]
Seconds = Annotated[float, Field(gt=0, le=LONGEST)]
Count = Annotated[int, Field(ge=0)]
Resumes = Annotated[int, Field(ge=0, le=16)]
Weight = Annotated[str, BeforeValidator(_weight)]
Weights = Annotated[tuple[Weight, ...], BeforeValidator(_weights)]
Scheme = Literal["http", "https"]
Delay = Annotated[float, Field(ge=0, le=LONGEST)]
Policy = Literal["round_robin", "least_loaded", "power_of_two", "session", "prefix"]
Lower = BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value)


def _setting(default: Any, group: str, description: str, metavar: str = "") -> Any:
    return Field(
        default, description=description, json_schema_extra={"group": group, "metavar": metavar}
    )


class Settings(BaseSettings):
    """How one router runs. Times are seconds."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        extra="forbid",
        frozen=True,
        enable_decoding=False,
        hide_input_in_errors=True,
    )

    config: Path | None = _setting(
        None, "General", "YAML file with any of these settings, named as the flags are.", "FILE"
    )

    prefiller_hosts: Hosts = _setting(
        (),
        "Engines",
        "Hosts of the prefill engines: names, IPv4 or IPv6 addresses; https:// before one for TLS.",
        "HOST",
    )
    prefiller_ports: Ports = _setting(
        (), "Engines", "Their HTTP ports: one for each host, or one for all.", "PORT"
    )
    decoder_hosts: Hosts = _setting((), "Engines", "Hosts of the decode engines.", "HOST")
    decoder_ports: Ports = _setting(
        (), "Engines", "Their HTTP ports: one for each host, or one for all.", "PORT"
    )

    engines_file: Path | None = _setting(
        None,
        "Discovery",
        "YAML file that lists engines; watched, and what it lists comes and goes with it.",
        "FILE",
    )
    prefiller_dns: DnsNames = _setting(
        (),
        "Discovery",
        "Names of which every address is a prefill engine: name:port (A, AAAA), or "
        "_http._tcp.name (SRV); https:// before it for TLS. Asked again as their TTLs say.",
        "NAME",
    )
    decoder_dns: DnsNames = _setting((), "Discovery", "The same for decode engines.", "NAME")
    kubernetes_prefill_selector: Selector | None = _setting(
        None,
        "Discovery",
        "Label selector of the pods that are prefill engines; a pod's own labels may say more.",
        "SELECTOR",
    )
    kubernetes_decode_selector: Selector | None = _setting(
        None, "Discovery", "The same for decode engines.", "SELECTOR"
    )
    kubernetes_namespace: Namespace | None = _setting(
        None, "Discovery", "Where these pods are; the router's own namespace if not set.", "NAME"
    )
    kubernetes_port: Annotated[str, BeforeValidator(_port_of_pod)] = _setting(
        "8000",
        "Discovery",
        "The engines' HTTP port: a number, or the name that pods give it.",
        "PORT",
    )
    kubernetes_config: Path | None = _setting(
        None,
        "Discovery",
        "Kubeconfig file for a router outside the cluster. If not set: the pod's service account, "
        "else $KUBECONFIG, else ~/.kube/config.",
        "FILE",
    )

    kubernetes_scheme: Annotated[Scheme, Lower] = _setting(
        "http",
        "Discovery",
        "How pods are spoken to that do not say it (annotation disagg-router.io/scheme).",
        "{http,https}",
    )

    warm_up: Literal["off", "lazy", "eager"] = _setting(
        "lazy",
        "Discovery",
        "A tiny request for each new pair of engines, so that no user waits for their handshake. "
        "lazy: for engines that come while the router runs; eager: for all, and new ones get "
        "nothing else before.",
        "off|lazy|eager",
    )

    host: Host = _setting(
        "127.0.0.1", "Server", "Address to listen on; 0.0.0.0 for every interface.", "HOST"
    )
    port: Annotated[int, Field(ge=0, le=65535)] = _setting(
        8000, "Server", "Port to listen on; 0 takes a free one.", "PORT"
    )
    max_body_size: ByteSize = _setting(
        ByteSize(64 * 1024 * 1024),
        "Server",
        "Largest request body, in bytes or as in 64MiB; more is answered 413.",
        "SIZE",
    )
    max_header_size: ByteSize = _setting(
        ByteSize(64 * 1024),
        "Server",
        "Largest head of a request (431) or of an engine's answer (502).",
        "SIZE",
    )
    max_held_bodies: ByteSize = _setting(
        ByteSize(1024 * 1024 * 1024),
        "Server",
        "Most bytes of request bodies held at once, those of all requests together; what goes "
        "beyond is answered 503 before it is read. 0: no limit.",
        "SIZE",
    )
    max_connections: Count = _setting(
        16_384,
        "Server",
        "Most connections of clients; requests on more of them are answered 503. 0: no limit.",
        "N",
    )
    keep_alive_timeout: Seconds = _setting(
        75.0, "Server", "How long an idle client connection is kept.", "SECONDS"
    )
    client_read_timeout: Seconds = _setting(
        60.0, "Server", "Longest time from a request's first byte to its last (408).", "SECONDS"
    )
    workers: Annotated[int, Field(ge=1, le=256)] = _setting(
        1,
        "Server",
        "Processes that share the port. More than one need a conversation store that they share.",
        "N",
    )
    liveness_port: Annotated[int, Field(ge=0, le=65535)] | None = _setting(
        None,
        "Server",
        "Port where /health and /metrics are also answered, by a thread that is never too busy for "
        "it: the one for liveness probes; 0 takes a free one.",
        "PORT",
    )
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = _setting(
        None,
        "Server",
        "Port of its own for /metrics, which then is nowhere else; 0 takes a free one.",
        "PORT",
    )
    metrics_host: Host = _setting(
        "127.0.0.1", "Server", "Address that it listens on; it asks nobody who he is.", "HOST"
    )
    shutdown_delay: Delay = _setting(
        1.0,
        "Server",
        "After SIGTERM: how long to keep accepting while /ready already says 503.",
        "SECONDS",
    )
    shutdown_timeout: Delay = _setting(
        25.0,
        "Server",
        "Then: how long running requests may go on before they are ended.",
        "SECONDS",
    )

    connect_timeout: Seconds = _setting(
        5.0, "Deadlines", "Longest wait for a connection to an engine.", "SECONDS"
    )
    prefill_timeout: Seconds = _setting(
        600.0,
        "Deadlines",
        "Longest wait for a prefiller's answer, its queue included (504).",
        "SECONDS",
    )
    decode_first_byte_timeout: Seconds = _setting(
        600.0,
        "Deadlines",
        "Longest wait for a decoder's first byte (504). An answer that is not streamed has its "
        "first byte when it is complete.",
        "SECONDS",
    )
    stream_idle_timeout: Seconds = _setting(
        300.0,
        "Deadlines",
        "Longest silence within an answer, and longest time that a client may not read.",
        "SECONDS",
    )
    stream_heartbeat: Annotated[Delay, AfterValidator(_heartbeat)] = _setting(
        0.0,
        "Deadlines",
        "Longest silence towards a client that asked for a stream, its wait for the first byte "
        "included: then an SSE comment is sent, and again. After the first one failures come as "
        "events, with status 200. 0: no comments.",
        "SECONDS",
    )
    request_timeout: Seconds = _setting(
        3600.0, "Deadlines", "Longest time for everything together.", "SECONDS"
    )

    max_engine_requests: Count = _setting(
        0,
        "Admission",
        "Most requests that one engine has from this process, those in its queue included; more "
        "wait here. 0: no limit.",
        "N",
    )
    max_engine_prefill_tokens: Count = _setting(
        0,
        "Admission",
        "Most prompt tokens (estimated) that one engine has to compute at a time; a larger prompt "
        "waits until there are none. 0: no limit.",
        "N",
    )
    queue_size: Count = _setting(
        1024,
        "Admission",
        "Most requests that wait for room at engines, each tenant's in its turn; more are answered "
        "429 where they are the tenant's own, else 503. 0: none waits.",
        "N",
    )
    queue_timeout: Seconds = _setting(
        30.0, "Admission", "Longest wait for room at engines (503).", "SECONDS"
    )
    queue_priorities: bool = _setting(
        True,
        "Admission",
        "Let callers say who waits less: X-Vllm-Priority, else the body's priority; lower is "
        "sooner, and 0 where nothing is said.",
    )

    health_interval: Seconds = _setting(
        1.0, "Health", "Seconds between two probes of an engine (GET /health).", "SECONDS"
    )
    health_timeout: Seconds = _setting(
        1.0, "Health", "Longest wait for a probe's answer.", "SECONDS"
    )
    health_failures: Annotated[int, Field(ge=1)] = _setting(
        2,
        "Health",
        "Failed probes in a row that make a healthy engine unhealthy. A refused connection does "
        "so at once.",
        "N",
    )

    transfer_mode: Annotated[Literal["auto", "pull", "push"], Lower] = _setting(
        "auto",
        "Choice",
        "pull: the decoder is asked when the prefiller has answered, and reads its blocks. push: "
        "both are asked at once, and the prefiller writes. auto: as the engines say they are set "
        "up.",
        "{auto,pull,push}",
    )
    first_token: Annotated[Literal["auto", "decoder"], Lower] = _setting(
        "auto",
        "Choice",
        "auto: the token that a prefiller samples is the answer's first, where both engines offer "
        "that: the decoder renders nothing and goes on with the second (docs/mid-answer.md). "
        "decoder: it samples the first again.",
        "{auto,decoder}",
    )
    max_resumes: Resumes = _setting(
        2,
        "Choice",
        "How often another decoder goes on with a stream whose decoder has failed after the client "
        "had some of it, and as often with an answer for which one has no room, where the engines "
        "offer that; 0 is never.",
        "N",
    )
    max_resume_memory: ByteSize = _setting(
        ByteSize(256 * 1024 * 1024),
        "Choice",
        "Bytes for the token ids of all streams that another decoder could go on with, four for "
        "each token; a stream for which there is no room is not resumed. 0: no limit.",
        "SIZE",
    )
    prefill_policy: Annotated[Policy, Lower] = _setting(
        "prefix",
        "Choice",
        "Which prefiller: each in turn, by tokens in flight, by those of two picked at random, the "
        "conversation's own, or the one whose cache holds most of the prompt.",
        "POLICY",
    )
    decode_policy: Annotated[Policy, Lower] = _setting(
        "power_of_two",
        "Choice",
        "Which decoder, where a conversation does not say it.",
        "POLICY",
    )
    min_remote_prefill_tokens: Annotated[int, Field(ge=0)] = _setting(
        0,
        "Choice",
        "A decoder alone answers a prompt of which it lacks fewer tokens than this (estimated): "
        "so little is computed sooner than sent; 0: never. It knows what it holds of "
        "conversations, and with decode-policy prefix of all prompts.",
        "N",
    )
    without_prefiller: Annotated[Literal["decode", "refuse"], Lower] = _setting(
        "decode",
        "Choice",
        "When no prefiller can be asked: let a decoder do it all, or answer 503.",
        "{decode,refuse}",
    )
    without_prefiller_tokens: Annotated[int, Field(ge=0)] = _setting(
        16_384,
        "Choice",
        "The longest prompt that a decoder then does alone, in tokens (estimated); longer ones are "
        "answered 503.",
        "N",
    )

    group_weights: Weights = _setting(
        (),
        "Choice",
        "Shares of requests that groups of engines get, as in blue=9 green=1; groups that are not "
        "named go by their engines' weights.",
        "GROUP=WEIGHT",
    )

    engine_idle_connections: Annotated[int, Field(ge=0)] = _setting(
        256, "Connections", "Idle connections kept for each engine.", "N"
    )
    engine_idle_age: Seconds = _setting(
        4.0,
        "Connections",
        "How long they are kept: less than the engine's own keep-alive (5 s in vLLM).",
        "SECONDS",
    )
    max_answer_size: ByteSize = _setting(
        ByteSize(64 * 1024 * 1024),
        "Connections",
        "Largest answer that is held whole: a prefiller's, and errors.",
        "SIZE",
    )
    max_held_answers: ByteSize = _setting(
        ByteSize(256 * 1024 * 1024),
        "Connections",
        "Most bytes of large answers held whole at once, those of all requests together; an answer "
        "that goes beyond is answered 503. Answers up to 256 KiB do not count. 0: no limit.",
        "SIZE",
    )

    conversation_store: Annotated[str, BeforeValidator(_store)] = _setting(
        "memory",
        "Conversations",
        "Where a turn's decoder is remembered for the next turn: memory (this process), a Redis "
        "URL for several routers (redis://, rediss://, redis+cluster://, redis+sentinel://), or "
        "off.",
        "STORE",
    )
    conversation_store_password: SecretStr | None = _setting(
        None, "Conversations", "Redis password; a variable is safer than a flag.", "PASSWORD"
    )
    conversation_store_password_file: Path | None = _setting(
        None, "Conversations", "File with the Redis password, read at start.", "FILE"
    )
    conversation_store_key: Annotated[SecretStr, BeforeValidator(_keys)] | None = _setting(
        None,
        "Conversations",
        "Secret that signs turns in Redis, the same at all routers that share it; without one, "
        "routers do not reuse each other's turns. A variable is safer than a flag.",
        "KEY",
    )
    conversation_store_key_file: Path | None = _setting(
        None,
        "Conversations",
        "File with it, read at start. Of several lines the first one signs and each is accepted.",
        "FILE",
    )
    conversation_store_timeout: Seconds = _setting(
        0.25,
        "Conversations",
        "Longest wait for Redis. A turn that gets no answer goes on without reuse.",
        "SECONDS",
    )
    conversation_ttl: Seconds = _setting(
        450.0,
        "Conversations",
        "How long a turn can be reused: less than the decoders' decoder_kv_blocks_ttl (480).",
        "SECONDS",
    )
    responses_ttl: Seconds = _setting(
        3600,
        "Conversations",
        "How long a response of /v1/responses can be gone on with (previous_response_id), where "
        "conversations are kept.",
        "SECONDS",
    )
    conversation_max_entries: Annotated[int, Field(ge=1)] = _setting(
        100_000, "Conversations", "Most turns in the memory store; the oldest give way.", "N"
    )
    conversation_max_bytes: ByteSize = _setting(
        ByteSize(256 * 1024 * 1024), "Conversations", "Most bytes in the memory store.", "SIZE"
    )
    conversation_ids: Names = _setting(
        IDS,
        "Conversations",
        "Where a conversation's id is looked for, in this order: x-... is a header, prefix "
        "recognises a chat by its messages, anything else is a field of the body.",
        "NAME",
    )
    conversation_stream: Annotated[Literal["auto", "exact"], Lower] = _setting(
        "auto",
        "Conversations",
        "auto: streams are relayed as they come, and reused where the decoder puts its "
        "kv_transfer_params into them. exact: the decoder is asked without streaming, and the "
        "stream is made from its whole answer. Per request: conversation_stream.",
        "{auto,exact}",
    )
    conversation_unproven: Annotated[Literal["whole", "prompt", "off"], Lower] = _setting(
        "whole",
        "Conversations",
        "What is reused where engines cannot prove which tokens they hold (stock vLLM): the whole "
        "last turn when the messages extend it, at most its prompt, or nothing.",
        "{whole,prompt,off}",
    )
    tenant_header: Name = _setting(
        "authorization",
        "Conversations",
        "The header that tells callers apart: nobody reuses another one's turns.",
        "NAME",
    )
    affinity_load_factor: Annotated[float, Field(ge=1)] = _setting(
        1.5,
        "Conversations",
        "A turn, a session or a known prefix leaves its engine when that has more than this many "
        "times the mean legs.",
        "FACTOR",
    )
    affinity_load_floor: Annotated[int, Field(ge=0)] = _setting(
        8,
        "Conversations",
        "An engine with fewer legs than this (a prefiller: than 2) is never overloaded.",
        "N",
    )
    decode_first_threshold: Share = _setting(
        0.0,
        "Decode first",
        "Ask a decoder first, with this cache_hit_threshold: it answers alone if its cache holds "
        "this share of the prompt; 0: do not. A request's own cache_hit_threshold wins.",
        "SHARE",
    )
    decode_first_turns: Share = _setting(
        0.9,
        "Decode first",
        "Do so with a turn whose decoder holds about this share of it or more, if that is known to "
        "understand cache_hit_threshold; 0: never.",
        "SHARE",
    )
    scatter: Annotated[int, Field(ge=0, le=8)] = _setting(
        0,
        "Decode first",
        "Ask this many decoders at once where a stream has a threshold, as far as they are known "
        "to understand it: the first that accepts answers. 0 or 1: one.",
        "N",
    )

    admin_port: Annotated[int, Field(ge=0, le=65535)] | None = _setting(
        None,
        "Admin",
        "Port of the admin API: engines added and drained, groups weighed, settings read again. "
        "Off if not set; 0 takes a free one.",
        "PORT",
    )
    admin_host: Host = _setting(
        "127.0.0.1", "Admin", "Address that it listens on; any but loopback needs a token.", "HOST"
    )
    admin_token: Annotated[SecretStr, BeforeValidator(_token)] | None = _setting(
        None,
        "Admin",
        "Bearer token that callers of the admin API show. A variable is safer than a flag.",
        "TOKEN",
    )
    admin_token_file: Path | None = _setting(
        None, "Admin", "File with it, read at start and at reload.", "FILE"
    )

    ui: bool = _setting(
        False,
        "Page",
        "Serve a page at /ui where one sees engines and requests, and may chat.",
    )
    ui_token: Annotated[SecretStr, BeforeValidator(_token)] | None = _setting(
        None,
        "Page",
        "Token that the page asks for before it shows anything. A variable is safer than a flag.",
        "TOKEN",
    )
    ui_token_file: Path | None = _setting(None, "Page", "File with it, read at start.", "FILE")
    ui_port: Annotated[int, Field(ge=0, le=65535)] | None = _setting(
        None,
        "Page",
        "Port of its own for the page, which then is not on the clients' port; 0 takes a free one.",
        "PORT",
    )
    ui_host: Host = _setting("127.0.0.1", "Page", "Address that it listens on.", "HOST")

    api_keys_file: Path | None = _setting(
        None,
        "Keys",
        "YAML file of the keys that clients must show, as digests, with their owners and limits "
        "(disagg-router key makes one); watched. Without it everybody may come in.",
        "FILE",
    )
    key_limits_store: Annotated[str, BeforeValidator(_limits_store)] | None = _setting(
        None,
        "Keys",
        "Where keys' limits are counted: memory (this process), or a Redis URL for several "
        "routers. If not set: the conversation store, if that is Redis.",
        "STORE",
    )
    engine_api_key: Annotated[SecretStr, BeforeValidator(_credential)] | None = _setting(
        None,
        "Keys",
        "The engines' own API key, which they are shown instead of what the client shows. A "
        "variable is safer than a flag.",
        "KEY",
    )
    engine_api_key_file: Path | None = _setting(
        None, "Keys", "File with it, read at start.", "FILE"
    )

    tls_certfile: Path | None = _setting(
        None,
        "TLS",
        "Certificate chain (PEM): clients are served over TLS. Watched, with its key.",
        "FILE",
    )
    tls_keyfile: Path | None = _setting(
        None, "TLS", "Its private key; not needed where the chain's file has it.", "FILE"
    )
    tls_client_ca: Path | None = _setting(
        None,
        "TLS",
        "Certificates of who signs clients': none other is let in. Read at start.",
        "FILE",
    )
    engine_ca_file: Path | None = _setting(
        None,
        "TLS",
        "Certificates of who signs engines' whose address begins with https://; the system's if "
        "not set. Read at start.",
        "FILE",
    )
    engine_certfile: Path | None = _setting(
        None, "TLS", "Certificate chain (PEM) that such engines are shown. Watched.", "FILE"
    )
    engine_keyfile: Path | None = _setting(
        None, "TLS", "Its private key; not needed where the chain's file has it.", "FILE"
    )
    engine_tls_name: Host | None = _setting(
        None,
        "TLS",
        "The name that these engines' certificates have, where it is not the host that they are "
        "reached by: pods and DNS names are reached by their addresses.",
        "NAME",
    )

    cors_origins: Annotated[tuple[Origin, ...], BeforeValidator(_items)] = _setting(
        (),
        "Security",
        "Origins of web pages that may ask and read the answers, as in https://chat.example; * for "
        "every one. Pages of other origins read nothing.",
        "ORIGIN",
    )
    lora_updates: bool = _setting(
        False,
        "Security",
        "Let clients load and unload LoRA adapters at all engines. An engine loads what it is told "
        "from wherever it is told.",
    )
    trust_client_kv_params: bool = _setting(
        False,
        "Security",
        "Let clients send kv_transfer_params, which then go to a decoder as they are. They can "
        "make an engine connect to any address: only for callers that are trusted as much as the "
        "operator.",
    )

    log_level: Annotated[Literal["debug", "info", "warning", "error"], Lower] = _setting(
        "info", "Logs", "Least level that is logged.", "{debug,info,warning,error}"
    )
    log_format: Annotated[Literal["auto", "text", "short", "json"], Lower] = _setting(
        "auto",
        "Logs",
        "Log lines: json for machines, text with all names and values, short for a person who "
        "watches. auto: short on a terminal, else json.",
        "{auto,text,short,json}",
    )
    access_log: bool = _setting(True, "Logs", "One line for each request.")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        given = init_settings()
        variables = VariableSource(settings_cls)
        path = given.get("config") or variables().get("config")
        file = InitSettingsSource(settings_cls, read_file(Path(path)) if path else {})
        return init_settings, variables, file

    @model_validator(mode="after")
    def _pair_hosts_and_ports(self) -> Self:
        problems = [*_pairing(self, "prefiller"), *_pairing(self, "decoder")]
        if self.conversation_store_password and self.conversation_store_password_file:
            problems.append("--conversation-store-password and its -file are both set")
        if self.conversation_store_key and self.conversation_store_key_file:
            problems.append("--conversation-store-key and its -file are both set")
        if self.admin_token and self.admin_token_file:
            problems.append("--admin-token and its -file are both set")
        if self.ui_token and self.ui_token_file:
            problems.append("--ui-token and its -file are both set")
        if self.engine_api_key and self.engine_api_key_file:
            problems.append("--engine-api-key and its -file are both set")
        for certificate, needs in TLS_NEEDS:
            if getattr(self, needs) and not getattr(self, certificate):
                problems.append(f"{flag_of(needs)} needs {flag_of(certificate)}")
        if self.ui_port is not None and not self.ui:
            problems.append("--ui-port needs --ui")
        has_token = self.admin_token or self.admin_token_file
        if self.admin_port is not None and not has_token and not is_loopback(self.admin_host):
            problems.append(
                f"--admin-host {self.admin_host} can be reached by others: set --admin-token-file"
            )
        groups = [weight.partition("=")[0] for weight in self.group_weights]
        if len(set(groups)) < len(groups):
            problems.append("--group-weights names a group twice")
        if 0 < self.max_held_bodies < self.max_body_size:
            problems.append("--max-held-bodies is less than --max-body-size: a body would not fit")
        if 0 < self.max_held_answers < self.max_answer_size:
            problems.append(
                "--max-held-answers is less than --max-answer-size: an answer would not fit"
            )
        if self.workers > 1 and self.conversation_store == "memory":
            problems.append(
                f"--workers {self.workers} cannot share a conversation store in memory: set "
                "--conversation-store to a Redis URL, or to off"
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def store_password(self) -> str | None:
        """Raises SettingsError when its file cannot be read."""
        if self.conversation_store_password is not None:
            return self.conversation_store_password.get_secret_value()
        path = self.conversation_store_password_file
        return None if path is None else _secret_in("conversation_store_password_file", path)

    def store_keys(self) -> list[bytes]:
        """The first signs, all verify; none where none is set. Raises SettingsError."""
        if self.conversation_store_key is not None:
            return keys_in(self.conversation_store_key.get_secret_value())
        path = self.conversation_store_key_file
        if path is None:
            return []
        try:
            return keys_in(_secret_in("conversation_store_key_file", path))
        except ValueError as error:
            problem = f"{flag_of('conversation_store_key_file')} {path}: {error}"
            raise SettingsError([problem]) from None

    def admin_secret(self) -> str | None:
        """Raises SettingsError when its file cannot be read, or has no token."""
        return _token_of(self.admin_token, "admin_token_file", self.admin_token_file)

    def ui_secret(self) -> str | None:
        """Raises SettingsError when its file cannot be read, or has no token."""
        return _token_of(self.ui_token, "ui_token_file", self.ui_token_file)

    def engine_secret(self) -> str | None:
        """Raises SettingsError when its file cannot be read, or has no key."""
        name = "engine_api_key_file"
        return _token_of(self.engine_api_key, name, self.engine_api_key_file, check_credential)

    @property
    def limits_store(self) -> str:
        """memory, or a Redis URL."""
        if self.key_limits_store is not None:
            return self.key_limits_store
        is_shared = self.conversation_store not in ("memory", "off")
        return self.conversation_store if is_shared else "memory"

    def limits_password(self) -> str | None:
        """Raises SettingsError when its file cannot be read."""
        is_own = self.limits_store != self.conversation_store
        return None if is_own else self.store_password()

    def with_store_keys(self, keys: list[bytes]) -> Settings:
        """The same with these, so that no process reads them, or makes them, by itself."""
        text = SecretStr(b"\n".join(keys).decode())
        changes = {"conversation_store_key": text, "conversation_store_key_file": None}
        return self.model_copy(update=changes)

    @property
    def weights(self) -> dict[str, float]:
        """Of groups, by name."""
        pairs = (text.partition("=") for text in self.group_weights)
        return {group: float(weight) for group, _, weight in pairs}

    @property
    def prefillers(self) -> tuple[Address, ...]:
        return _pair(self.prefiller_hosts, self.prefiller_ports)

    @property
    def decoders(self) -> tuple[Address, ...]:
        return _pair(self.decoder_hosts, self.decoder_ports)

    @property
    def over_tls(self) -> frozenset[Address]:
        """Those of these that are reached over TLS."""
        pairs = (
            *zip(self.prefiller_hosts, self.prefillers, strict=True),
            *zip(self.decoder_hosts, self.decoders, strict=True),
        )
        return frozenset(address for host, address in pairs if host.startswith(TLS))

    def served_tls(self) -> Secured | None:
        """What clients are shown; None: they are served without TLS. Raises SettingsError."""
        if self.tls_certfile is None:
            return None
        try:
            return serving(Pair(self.tls_certfile, self.tls_keyfile), self.tls_client_ca)
        except ValueError as error:
            raise BrokenFileError([f"--tls-certfile: {error}"]) from None

    def engine_tls(self) -> Secured:
        """Raises SettingsError."""
        pair = None
        if self.engine_certfile is not None:
            pair = Pair(self.engine_certfile, self.engine_keyfile)
        try:
            return asking(self.engine_ca_file, pair)
        except ValueError as error:
            what = "--engine-ca-file" if pair is None else "--engine-ca-file, --engine-certfile"
            raise BrokenFileError([f"{what}: {error}"]) from None


class VariableSource(EnvSettingsSource):
    """The environment, without what Kubernetes puts there for a Service of our name."""

    def __call__(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in super().__call__().items()
            if not (isinstance(value, str) and SERVICE_LINK.match(value))
        }


def _is_discovered(settings: Settings, role: str) -> bool:
    """Whether engines of that role come from elsewhere than the flags."""
    selector = {
        "prefiller": settings.kubernetes_prefill_selector,
        "decoder": settings.kubernetes_decode_selector,
    }
    is_elsewhere = settings.engines_file or getattr(settings, f"{role}_dns") or selector[role]
    return bool(is_elsewhere or settings.admin_port is not None)


def _pairing(settings: Settings, role: str) -> Iterator[str]:
    hosts: tuple[str, ...] = getattr(settings, f"{role}_hosts")
    ports: tuple[int, ...] = getattr(settings, f"{role}_ports")
    if not hosts and not ports and _is_discovered(settings, role):
        return
    if not hosts or not ports:
        missing = "hosts" if not hosts else "ports"
        yield f"no {role} engine: --{role}-{missing} is missing"
    elif len(ports) not in (1, len(hosts)):
        yield (
            f"--{role}-hosts names {len(hosts)} and --{role}-ports {len(ports)}: "
            "give one port for each host, or one for all"
        )
    elif len(set(_pair(hosts, ports))) < len(hosts):
        yield f"--{role}-hosts and --{role}-ports name an engine twice"


def _pair(hosts: tuple[str, ...], ports: tuple[int, ...]) -> tuple[Address, ...]:
    spread = ports * len(hosts) if len(ports) == 1 else ports
    return tuple(map(Address, (host.removeprefix(TLS) for host in hosts), spread))


def _token_of(
    token: SecretStr | None,
    name: str,
    path: Path | None,
    check: Callable[[str], None] = check_token,
) -> str | None:
    """Raises SettingsError."""
    if token is not None:
        return token.get_secret_value()
    if path is None:
        return None
    text = _secret_in(name, path)
    try:
        check(text)
    except ValueError as error:
        raise SettingsError([f"{flag_of(name)} {path}: {error}"]) from None
    return text


def _secret_in(name: str, path: Path) -> str:
    """Raises SettingsError."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise SettingsError([f"{flag_of(name)} {path}: {reason}"]) from None


def read_file(path: Path) -> dict[str, Any]:
    """The file's settings, under the model's names. Raises SettingsError."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise SettingsError([f"--config {path}: {reason}"]) from error
    except yaml.YAMLError as error:
        raise SettingsError([f"--config {path}: {' '.join(str(error).split())}"]) from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError([f"--config {path}: not a mapping of settings"])
    settings = {str(key).replace("-", "_"): value for key, value in content.items()}
    if "config" in settings:
        raise SettingsError([f"--config {path}: config: a file cannot name another"])
    return settings


def load(flags: Mapping[str, Any]) -> Settings:
    """The settings from flags, environment and file. Raises SettingsError."""
    try:
        return Settings(**flags)
    except ValidationError as error:
        raise SettingsError(_problems(error, flags)) from None


def _problems(error: ValidationError, flags: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for problem in error.errors(include_url=False, include_context=False):
        message = problem["msg"].removeprefix("Value error, ")
        if problem["loc"] and problem["loc"][0] in SECRETS:
            message = f"{_origin(str(problem['loc'][0]), flags)}: {message}"
        elif problem["loc"]:
            got = textwrap.shorten(repr(problem["input"]), 80)
            message = f"{_origin(str(problem['loc'][0]), flags)}: {message} (got {got})"
        lines += message.split("\n")
    return list(dict.fromkeys(lines))


def _origin(name: str, flags: Mapping[str, Any]) -> str:
    if name in flags:
        return flag_of(name)
    if name in Settings.model_fields and variable_of(name) in os.environ:
        return variable_of(name)
    return f"{name.replace('_', '-')} (in the configuration file)"


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Variables with our prefix that are no setting: misspelt, most likely."""
    links = (f"{PREFIX}SERVICE_", f"{PREFIX}PORT_")
    known = {ADMIN_URL, *map(variable_of, Settings.model_fields)}
    ours = {name for name in environment if name.startswith(PREFIX) and not name.startswith(links)}
    return sorted(ours - known)


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    return PREFIX + name.upper()


def group_of(field: FieldInfo) -> str:
    extra = field.json_schema_extra
    assert isinstance(extra, dict)
    return str(extra["group"])


def metavar_of(field: FieldInfo) -> str:
    extra = field.json_schema_extra
    assert isinstance(extra, dict)
    return str(extra["metavar"])


def default_of(field: FieldInfo) -> str:
    """The default as a person would write it."""
    default = field.default
    if isinstance(default, ByteSize):
        return default.human_readable().replace(".0", "")
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, float):
        return f"{default:g}"
    if isinstance(default, tuple):
        return " ".join(default)
    return "" if default is None else str(default)


def settings_table() -> str:
    """Every setting as a Markdown table: flag, variable, default, meaning."""
    rows = ["| Flag | Variable | Default | Meaning |", "| --- | --- | --- | --- |"]
    for name, field in Settings.model_fields.items():
        default = f"`{value}`" if (value := default_of(field)) else ""
        flag, variable = f"`{flag_of(name)}`", f"`{variable_of(name)}`"
        rows.append(f"| {flag} | {variable} | {default} | {field.description} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(settings_table())
