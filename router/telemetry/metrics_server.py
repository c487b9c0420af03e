"""Metrics over sockets of their own: the liveness port, and those of several worker processes.

The liveness port serves /health and /metrics from separate threads, independent of the event loop.
A process whose event loop is busy for seconds must not be killed, so /health reports only that the
process is alive. Readiness is GET /ready on the router's port.

Each worker process serves its metrics on a Unix socket, from a thread. The process that gets GET
/metrics reads all sockets and adds the samples up. It also saves each worker's page beside the
socket. If a worker has died or does not answer, its counters are those of its last page, because
Prometheus would take a sum that falls for a restart and count everything again.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseRequestHandler, BaseServer, ThreadingUnixStreamServer

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from router.telemetry.metrics import CONTENT_TYPE

Exposition = Callable[[], bytes]
CLIENT_TIMEOUT_S = 5.0
# Endings and names of the files with pages of workers, and of those that have ended.
PAGE, ENDED = ".metrics", "ended"
END_OF_PAGE = b"# EOF\n"
WORKER_TIMEOUT_S = 2.0
# These samples are not added up: the worst value of any worker counts.
MERGED_BY_MINIMUM = frozenset(
    (
        "disagg_router_certificate_end_timestamp_seconds",
        "disagg_router_engine_healthy",
        "disagg_router_group_engines",
        "disagg_router_group_weight",
        "disagg_router_pair_bytes_per_second",
        "disagg_router_peer_routers",
        "disagg_router_source_engines",
        "disagg_router_source_told_timestamp_seconds",
    )
)
MERGED_BY_MAXIMUM = frozenset(
    (
        "disagg_router_pair_slowness",
        "disagg_router_pair_transfer_seconds",
        "disagg_router_engine_circuit",
        "disagg_router_engine_draining",
        "disagg_router_engine_degraded",
        "disagg_router_engine_shares_id",
        "disagg_router_file_trouble",
        "disagg_router_fleet_changes_total",  # each worker sees all of them
        "disagg_router_engine_preferred_role",
        "disagg_router_engine_prefill_tokens_per_second",
        "disagg_router_pair_avoided",
        "disagg_router_recent_time_to_first_byte_seconds",
        "disagg_router_role_changes_total",
        "disagg_router_source_trouble",
    )
)
SampleKey = tuple[str, tuple[tuple[str, str], ...]]


@contextlib.contextmanager
def serve_in_thread(server: BaseServer) -> Iterator[None]:
    """Serve until the block ends."""
    with server:
        threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()


# The liveness port.


class LivenessServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, exposition: Exposition | None) -> None:
        """Serve no metrics if `exposition` is None. Raises OSError if the port cannot be bound."""
        if ":" in host:
            self.address_family = socket.AF_INET6
        self.exposition = exposition
        super().__init__((host, port), LivenessHandler)


class LivenessHandler(BaseHTTPRequestHandler):
    server: LivenessServer
    timeout = CLIENT_TIMEOUT_S

    def do_GET(self) -> None:
        exposition = self.server.exposition
        if self.path == "/health":
            self._answer(200, "application/json", b'{"status":"ok"}')
        elif self.path == "/metrics" and exposition is not None:
            self._answer(200, CONTENT_TYPE, exposition())
        else:
            known = "/health is" if exposition is None else "/health and /metrics are"
            self._answer(404, "text/plain", f"{known} here\n".encode())

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


# Metrics of several workers.


class WorkerMetricsServer(ThreadingUnixStreamServer):
    daemon_threads = True

    def __init__(self, path: Path, exposition: Exposition) -> None:
        self.exposition = exposition
        super().__init__(str(path), WorkerMetricsHandler)


class WorkerMetricsHandler(BaseRequestHandler):
    server: WorkerMetricsServer

    def handle(self) -> None:
        self.request.settimeout(WORKER_TIMEOUT_S)
        self.request.sendall(self.server.exposition() + END_OF_PAGE)


def metrics_socket(directory: Path, number: int, pid: int | None) -> Path:
    """Return the path of a worker process's socket: its successor has another one."""
    return directory / f"{number}-{pid}.sock"


@contextlib.contextmanager
def serve_worker_metrics(path: Path, exposition: Exposition) -> Iterator[None]:
    """Serve this worker's metrics at the Unix socket `path` until the block ends."""
    with serve_in_thread(WorkerMetricsServer(path, exposition)):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def collect_worker_metrics(directory: Path) -> bytes:
    """Return the merged metrics of all workers: present values of those that answer, and the last
    known counters of the others."""
    with (directory / "pages.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes may be asked for metrics
        answers = {path.stem: _read_worker(path) for path in directory.glob("*.sock")}
        present = {name: text for name, text in answers.items() if text}
        for name, text in present.items():
            _save_page(directory, name, text)
        saved = [path for path in directory.glob(f"*{PAGE}") if path.stem not in present]
        counters = {path: counters_of(path.read_text()) for path in saved}
        ended = [path for path in saved if answers.get(path.stem) is None]
        if len(ended) > 1:  # a worker that dies again and again leaves one page
            folded = merge_expositions([counters[path] for path in ended])
            _save_page(directory, ENDED, folded.decode())
            for path in ended:
                if path.stem != ENDED:
                    path.unlink()
    return merge_expositions([*present.values(), *counters.values()])


def _save_page(directory: Path, name: str, text: str) -> None:
    written = directory / f"{name}.new"
    written.write_text(text)
    written.replace(directory / f"{name}{PAGE}")


def _read_worker(path: Path) -> str | None:
    """Return the worker's page, "" if the worker sends no whole page in time, or None if it has
    ended."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(WORKER_TIMEOUT_S)
            connection.connect(str(path))
            page = connection.makefile("rb").read()
    except (ConnectionRefusedError, FileNotFoundError):
        return None
    except OSError:
        return ""
    return page.decode() if page.endswith(END_OF_PAGE) else ""


def counters_of(text: str) -> str:
    """Return the counters and histograms of a page. Its other samples describe the present."""
    families = text_string_to_metric_families(text)
    kept = [family for family in families if family.type in ("counter", "histogram", "summary")]
    return generate_latest(MergedMetrics(kept)).decode()


class MergedMetrics(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def merge_expositions(texts: Iterable[str]) -> bytes:
    """Merge Prometheus texts: samples of the same name and labels are added up."""
    merged: dict[str, Metric] = {}
    values: defaultdict[str, dict[SampleKey, float]] = defaultdict(dict)
    for text in texts:
        for metric in text_string_to_metric_families(text):
            merged.setdefault(metric.name, metric)
            for sample in metric.samples:
                of_metric, key = values[metric.name], (sample.name, tuple(sample.labels.items()))
                merge = _merge_function(sample.name)
                known = of_metric.get(key)
                of_metric[key] = sample.value if known is None else merge((known, sample.value))
    for name, metric in merged.items():
        metric.samples = [
            Sample(sample, dict(labels), value) for (sample, labels), value in values[name].items()
        ]
    return generate_latest(MergedMetrics(merged.values()))


def _merge_function(sample: str) -> Callable[[tuple[float, float]], float]:
    if sample in MERGED_BY_MINIMUM or sample.endswith("_created"):
        return min
    return max if sample in MERGED_BY_MAXIMUM else sum
