"""The liveness port: /health and /metrics from separate threads, independent of the event loop.

A process whose event loop is busy for seconds must not be killed, so /health reports only that the
process is alive. Readiness is GET /ready on the router's port.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET6

from router.telemetry.metrics import CONTENT_TYPE

Exposition = Callable[[], bytes]
CLIENT_TIMEOUT_S = 5.0


class LivenessServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, exposition: Exposition | None) -> None:
        """Serve no metrics if `exposition` is None. Raises OSError if the port cannot be bound."""
        if ":" in host:
            self.address_family = AF_INET6
        self.exposition = exposition
        super().__init__((host, port), LivenessHandler)


class LivenessHandler(BaseHTTPRequestHandler):
    server: LivenessServer
    timeout = CLIENT_TIMEOUT_S

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
        """Log nothing: probes come every few seconds."""

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextlib.contextmanager
def serve_in_thread(server: LivenessServer) -> Iterator[None]:
    """Serve until the block ends."""
    with server:
        threading.Thread(target=server.serve_forever, name="liveness", daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()
