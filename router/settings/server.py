"""Settings of the HTTP servers: ports, limits, timeouts, TLS, access, security, logs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ByteSize, Field, SecretStr

from router.common.tls import TlsContext, client_context, server_context
from router.settings import fields
from router.settings.fields import MIB, BrokenFileError, Lower, SettingsGroup, flag_of, is_loopback

# Each second setting has no meaning without the first.
TLS_REQUIREMENTS = (
    ("tls_certfile", "tls_keyfile"),
    ("tls_certfile", "tls_client_ca"),
    ("engine_certfile", "engine_keyfile"),
)


class ServerSettings(SettingsGroup):
    """Server

    host: Bind address; 0.0.0.0 for every interface.
    port: Port to listen on; 0 takes a free port.
    max_body_size: Largest request body, uncompressed, in bytes or as in 64MiB (else 413).
    max_header_size: Largest header section of a request (else 431) or of an engine's answer (else
        502).
    max_held_bodies: Memory for request bodies, over all requests (else 503, before the body is
        read). 0: no limit.
    max_connections: Largest number of client connections (else 503). 0: no limit.
    keep_alive_timeout: How long an idle client connection is kept.
    client_read_timeout: Longest time from the first to the last byte of a request (else 408).
    workers: Number of processes that share the port. Several need a conversation store in Redis, or
        none.
    liveness_port: Additional port for /health and /metrics, for liveness probes: it answers while
        the router is busy. 0 takes a free port.
    metrics_port: Separate port for /metrics; the other ports then do not serve it. 0 takes a free
        port.
    metrics_host: Bind address of the metrics port (unauthenticated).
    shutdown_delay: After SIGTERM: how long the router still accepts requests while /ready answers
        503.
    shutdown_timeout: After the shutdown delay: how long running requests may continue.
    """

    host: fields.Host = "127.0.0.1"
    port: fields.ListenPort = 8000
    max_body_size: ByteSize = ByteSize(64 * MIB)
    max_header_size: ByteSize = ByteSize(64 * 1024)
    max_held_bodies: ByteSize = ByteSize(1024 * MIB)
    max_connections: fields.Count = 16_384
    keep_alive_timeout: fields.Seconds = 75.0
    client_read_timeout: fields.Seconds = 60.0
    workers: Annotated[int, Field(ge=1, le=256)] = 1
    liveness_port: fields.ListenPort | None = None
    metrics_port: fields.ListenPort | None = None
    metrics_host: fields.Host = "127.0.0.1"
    shutdown_delay: fields.Delay = 1.0
    shutdown_timeout: fields.Delay = 25.0

    def conflicts(self) -> Iterator[str]:
        if 0 < self.max_held_bodies < self.max_body_size:
            yield "--max-held-bodies is less than --max-body-size: a body would not fit"


class TimeoutSettings(SettingsGroup):
    """Timeouts

    connect_timeout: Longest wait for a connection to an engine.
    prefill_timeout: Longest wait for the answer of a prefill engine, including its queue (else
        504).
    decode_first_byte_timeout: Longest wait for a decode engine's first byte (else 504). The first
        byte of an unstreamed answer comes at its end.
    stream_idle_timeout: Longest silence within an answer, and longest time that a client may stop
        reading.
    stream_heartbeat: Send an SSE comment to a streaming client after each silence of this length,
        also before the first byte. Later failures are events with status 200. 0: off.
    request_timeout: Longest time for a whole request.
    """

    connect_timeout: fields.Seconds = 5.0
    prefill_timeout: fields.Seconds = 600.0
    decode_first_byte_timeout: fields.Seconds = 600.0
    stream_idle_timeout: fields.Seconds = 300.0
    stream_heartbeat: fields.Heartbeat = 0.0
    request_timeout: fields.Seconds = 3600.0


class TlsSettings(SettingsGroup):
    """TLS

    tls_certfile: Certificate chain (PEM) of the router, for TLS with clients; watched, with its
        key.
    tls_keyfile: Private key of that certificate, unless the chain's file contains it.
    tls_client_ca: CA bundle used to verify client certificates (mTLS). Read at start.
    engine_ca_file: CA bundle used to verify engines with https://; by default the system's CAs.
        Read at start.
    engine_certfile: Certificate chain (PEM) that the router presents to engines with https://.
        Watched.
    engine_keyfile: Private key of that certificate, unless the chain's file contains it.
    engine_tls_name: Name in the engines' certificates, if it differs from the host, as for pods and
        DNS names, which are reached by IP address.
    """

    tls_certfile: Path | None = None
    tls_keyfile: Path | None = None
    tls_client_ca: Path | None = None
    engine_ca_file: Path | None = None
    engine_certfile: Path | None = None
    engine_keyfile: Path | None = None
    engine_tls_name: fields.Host | None = None

    def conflicts(self) -> Iterator[str]:
        for certificate, dependent in TLS_REQUIREMENTS:
            if getattr(self, dependent) and not getattr(self, certificate):
                yield f"{flag_of(dependent)} needs {flag_of(certificate)}"

    def served_tls(self) -> TlsContext | None:
        """Return the TLS context for clients, or None without TLS. Raises SettingsError."""
        paths = tuple(filter(None, (self.tls_certfile, self.tls_keyfile)))
        try:
            return server_context(paths, self.tls_client_ca) if paths else None
        except ValueError as error:
            raise BrokenFileError([f"--tls-certfile: {error}"]) from None

    def engine_tls(self) -> TlsContext:
        """Return the TLS context for engines. Raises SettingsError."""
        paths = tuple(filter(None, (self.engine_certfile, self.engine_keyfile)))
        try:
            return client_context(self.engine_ca_file, paths)
        except ValueError as error:
            what = "--engine-ca-file, --engine-certfile" if paths else "--engine-ca-file"
            raise BrokenFileError([f"{what}: {error}"]) from None


class AdminSettings(SettingsGroup):
    """Admin

    admin_port: Port of the admin API: engines, drains, weights of groups, reload. 0 takes a free
        port.
    admin_host: Bind address of the admin API. Any address other than loopback needs a token.
    admin_token: Bearer token that the admin API requires.
    admin_token_file: File with the admin token, read at start and at reload.
    """

    admin_port: fields.ListenPort | None = None
    admin_host: fields.Host = "127.0.0.1"
    admin_token: SecretStr | None = None
    admin_token_file: Path | None = None

    def conflicts(self) -> Iterator[str]:
        has_token = self.admin_token or self.admin_token_file
        if self.admin_port is not None and not has_token and not is_loopback(self.admin_host):
            yield f"--admin-host {self.admin_host} can be reached by others: set --admin-token-file"


class DashboardSettings(SettingsGroup):
    """Dashboard

    ui: Serve a dashboard at /ui: engines, requests and a chat.
    ui_token: Token that the dashboard requires.
    ui_token_file: File with the dashboard's token, read at start.
    ui_port: Separate port for the dashboard; the clients' port then does not serve it. 0 takes a
        free port.
    ui_host: Bind address of the dashboard's port.
    """

    ui: bool = False
    ui_token: SecretStr | None = None
    ui_token_file: Path | None = None
    ui_port: fields.ListenPort | None = None
    ui_host: fields.Host = "127.0.0.1"

    def conflicts(self) -> Iterator[str]:
        if self.ui_port is not None and not self.ui:
            yield "--ui-port needs --ui"


class KeySettings(SettingsGroup):
    """API keys

    api_keys_file: YAML file of the API keys that clients must send, as digests, with owners and
        limits; watched. `disagg-router key` makes an entry. If not set, requests need no key.
    key_limits_store: Where usage is counted for the keys' limits: memory (this process), or a Redis
        URL that routers share. By default the conversation store, if that is Redis.
    engine_api_key: API key that the router sends to engines instead of the client's.
    engine_api_key_file: File with the engines' API key, read at start.
    """

    api_keys_file: Path | None = None
    key_limits_store: fields.LimitsStore | None = None
    engine_api_key: SecretStr | None = None
    engine_api_key_file: Path | None = None


class SecuritySettings(SettingsGroup):
    """Security

    cors_origins: Origins of web pages that may send requests and read the answers, as in
        https://chat.example; * allows all.
    lora_updates: Let clients load and unload LoRA adapters at all engines, from any path or URL
        that the client names.
    trust_client_kv_params: Pass clients' kv_transfer_params, and internal fields and headers of
        other routers, to the decode engine. They can make an engine connect to any address: only
        for clients that you trust as much as the operator.
    """

    cors_origins: fields.Origins = ()
    lora_updates: bool = False
    trust_client_kv_params: bool = False


class LogSettings(SettingsGroup):
    """Logs

    log_level: Lowest level that is logged.
    log_format: Format of log lines. json: for machines. text: all names and values. short: for a
        terminal. auto: short on a terminal, else json.
    access_log: Log one line for each request.
    """

    log_level: Annotated[Literal["debug", "info", "warning", "error"], Lower] = "info"
    log_format: Annotated[Literal["auto", "text", "short", "json"], Lower] = "auto"
    access_log: bool = True
