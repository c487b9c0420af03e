"""Health and metrics from threads of their own, for machines that must not wait for the event loop.

A loop that is busy for seconds is no reason to kill the process, so /health says only that the
process lives. Readiness is the router's own matter: GET /ready on its port.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET6

from router.telemetry.metrics import CONTENT_TYPE

Exposition = Callable[[], bytes]
# Seconds that a client of this port may take.
PATIENCE = 5.0


class LivenessServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, exposition: Exposition | None) -> None:
        """Without metrics where there is no `exposition`. Raises OSError when it cannot listen."""
        if ":" in host:
            self.address_family = AF_INET6
        self.exposition = exposition
        super().__init__((host, port), Handler)


class Handler(BaseHTTPRequestHandler):
    server: LivenessServer
    timeout = PATIENCE

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(200, "application/json", b'{"status":"ok"}')
        elif self.path == "/metrics" and self.server.exposition is not None:
            self._answer(200, CONTENT_TYPE, self.server.exposition())
        elif self.server.exposition is not None:
            self._answer(404, "text/plain", b"/health and /metrics are here\n")
        else:
            self._answer(404, "text/plain", b"/health is here\n")

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Probes come every few seconds, and say nothing that is worth a line."""

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextlib.contextmanager
def answering(server: LivenessServer) -> Iterator[None]:
    """Serves until the block ends."""
    with server:
        threading.Thread(target=server.serve_forever, name="liveness", daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()
