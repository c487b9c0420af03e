"""Settings of the HTTP server towards clients: ports, limits, timeouts, TLS, security, logs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ByteSize, Field

from router.common.tls import CertificateFiles, TlsContext, client_context, server_context
from router.settings.fields import (
    MIB,
    Count,
    Delay,
    Heartbeat,
    Host,
    ListenPort,
    Lower,
    Origins,
    Seconds,
    SettingsGroup,
)
from router.settings.names import BrokenFileError, flag_of

# Each second setting has no meaning without the first.
TLS_REQUIREMENTS = (
    ("tls_certfile", "tls_keyfile"),
    ("tls_certfile", "tls_client_ca"),
    ("engine_certfile", "engine_keyfile"),
)


class ServerSettings(SettingsGroup):
    title = "Server"

    host: Host = "127.0.0.1"
    """Bind address; 0.0.0.0 for every interface."""
    port: ListenPort = 8000
    """Port to listen on; 0 takes a free port."""
    max_body_size: ByteSize = ByteSize(64 * MIB)
    """Largest request body, in bytes or as in 64MiB. A larger body gets status 413."""
    max_header_size: ByteSize = ByteSize(64 * 1024)
    """Largest header section of a request (else 431) or of an engine's answer (else 502)."""
    max_held_bodies: ByteSize = ByteSize(1024 * MIB)
    """Memory for request bodies, over all requests. A body beyond the limit gets status 503 before
    it is read. 0: no limit."""
    max_connections: Count = 16_384
    """Largest number of client connections. Requests on further connections get status 503. 0: no
    limit."""
    keep_alive_timeout: Seconds = 75.0
    """How long an idle client connection is kept."""
    client_read_timeout: Seconds = 60.0
    """Longest time from the first to the last byte of a request (else 408)."""
    workers: Annotated[int, Field(ge=1, le=256)] = 1
    """Number of processes that share the port. Several processes need a shared conversation store
    (Redis) or none."""
    liveness_port: ListenPort | None = None
    """Additional port for /health and /metrics, served by a separate thread. Use it for liveness
    probes: it answers while the router is busy. 0 takes a free port."""
    metrics_port: ListenPort | None = None
    """Separate port for /metrics, which the other ports then do not serve. 0 takes a free port."""
    metrics_host: Host = "127.0.0.1"
    """Bind address of the metrics port (unauthenticated)."""
    shutdown_delay: Delay = 1.0
    """After SIGTERM: how long the router still accepts requests while /ready answers 503."""
    shutdown_timeout: Delay = 25.0
    """After the shutdown delay: how long running requests may continue."""

    def conflicts(self) -> Iterator[str]:
        if 0 < self.max_held_bodies < self.max_body_size:
            yield "--max-held-bodies is less than --max-body-size: a body would not fit"


class TimeoutSettings(SettingsGroup):
    title = "Timeouts"

    connect_timeout: Seconds = 5.0
    """Longest wait for a connection to an engine."""
    prefill_timeout: Seconds = 600.0
    """Longest wait for the answer of a prefill engine, including its queue (else 504)."""
    decode_first_byte_timeout: Seconds = 600.0
    """Longest wait for the first byte of a decode engine's answer (else 504). An answer that is not
    streamed sends its first byte when it is complete."""
    stream_idle_timeout: Seconds = 300.0
    """Longest silence within an answer, and longest time that a client may stop reading."""
    stream_heartbeat: Heartbeat = 0.0
    """Send an SSE comment to a streaming client after each silence of this length, also before the
    first byte. After the first comment failures are reported as events, with status 200. 0: no
    comments."""
    request_timeout: Seconds = 3600.0
    """Longest time for a whole request."""


class TlsSettings(SettingsGroup):
    title = "TLS"

    tls_certfile: Path | None = None
    """Certificate chain (PEM) of the router. If set, clients are served over TLS. The router
    watches the certificate and its key."""
    tls_keyfile: Path | None = None
    """Private key of that certificate, unless the chain's file contains it."""
    tls_client_ca: Path | None = None
    """CA bundle used to verify client certificates (mTLS). Read at start."""
    engine_ca_file: Path | None = None
    """CA bundle used to verify engines with https://. If not set: the system's CAs. Read at start.
    """
    engine_certfile: Path | None = None
    """Certificate chain (PEM) that the router presents to engines with https://. Watched."""
    engine_keyfile: Path | None = None
    """Private key of that certificate, unless the chain's file contains it."""
    engine_tls_name: Host | None = None
    """Name in the engines' certificates, if it differs from the host. Pods and DNS names are
    reached by their IP addresses and need it."""

    def conflicts(self) -> Iterator[str]:
        for certificate, dependent in TLS_REQUIREMENTS:
            if getattr(self, dependent) and not getattr(self, certificate):
                yield f"{flag_of(dependent)} needs {flag_of(certificate)}"

    def served_tls(self) -> TlsContext | None:
        """Return the TLS context for clients, or None without TLS. Raises SettingsError."""
        if self.tls_certfile is None:
            return None
        try:
            files = CertificateFiles(self.tls_certfile, self.tls_keyfile)
            return server_context(files, self.tls_client_ca)
        except ValueError as error:
            raise BrokenFileError([f"--tls-certfile: {error}"]) from None

    def engine_tls(self) -> TlsContext:
        """Return the TLS context for engines. Raises SettingsError."""
        pair = None
        if self.engine_certfile is not None:
            pair = CertificateFiles(self.engine_certfile, self.engine_keyfile)
        try:
            return client_context(self.engine_ca_file, pair)
        except ValueError as error:
            what = "--engine-ca-file" if pair is None else "--engine-ca-file, --engine-certfile"
            raise BrokenFileError([f"{what}: {error}"]) from None


class SecuritySettings(SettingsGroup):
    title = "Security"

    cors_origins: Origins = ()
    """Origins of web pages that may send requests and read the answers, as in https://chat.example;
    * allows every origin."""
    lora_updates: bool = False
    """Let clients load and unload LoRA adapters at all engines. An engine loads adapters from any
    path or URL that the client names."""
    trust_client_kv_params: bool = False
    """Pass kv_transfer_params of client requests to the decode engine unchanged. They can make an
    engine connect to any address: enable it only for clients that you trust as much as the
    operator."""


class LogSettings(SettingsGroup):
    title = "Logs"

    log_level: Annotated[Literal["debug", "info", "warning", "error"], Lower] = "info"
    """Lowest level that is logged."""
    log_format: Annotated[Literal["auto", "text", "short", "json"], Lower] = "auto"
    """Format of log lines. json: for machines. text: all names and values. short: for a person at a
    terminal. auto: short on a terminal, else json."""
    access_log: bool = True
    """Log one line for each request."""
