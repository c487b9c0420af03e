"""Metrics of several worker processes, merged into those of one router.

Each worker serves its metrics on a Unix socket, from a thread. The process that gets GET /metrics
reads all sockets and adds the samples up. A worker that has died is left out with its counts, which
Prometheus treats as a counter reset.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

Exposition = Callable[[], bytes]
WORKER_TIMEOUT_S = 2.0
# These samples are not added up: the worst value of any worker counts.
MERGED_BY_MINIMUM = frozenset(
    (
        "disagg_router_certificate_end_timestamp_seconds",
        "disagg_router_engine_healthy",
        "disagg_router_group_engines",
        "disagg_router_group_weight",
        "disagg_router_source_engines",
        "disagg_router_source_told_timestamp_seconds",
    )
)
MERGED_BY_MAXIMUM = frozenset(
    (
        "disagg_router_engine_circuit",
        "disagg_router_engine_draining",
        "disagg_router_engine_shares_id",
        "disagg_router_file_trouble",
        "disagg_router_fleet_changes_total",  # each worker sees all of them
        "disagg_router_pair_avoided",
        "disagg_router_source_trouble",
    )
)
CREATED = "_created"


class WorkerMetricsServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

    def __init__(self, path: Path, exposition: Exposition) -> None:
        self.exposition = exposition
        super().__init__(str(path), WorkerMetricsHandler)


class WorkerMetricsHandler(socketserver.BaseRequestHandler):
    server: WorkerMetricsServer

    def handle(self) -> None:
        self.request.settimeout(WORKER_TIMEOUT_S)
        self.request.sendall(self.server.exposition())


@contextlib.contextmanager
def serve_worker_metrics(path: Path, exposition: Exposition) -> Iterator[None]:
    """Serve this worker's metrics at the Unix socket `path` until the block ends."""
    path.unlink(missing_ok=True)  # left by a worker that was killed
    with WorkerMetricsServer(path, exposition) as server:
        threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()
            path.unlink(missing_ok=True)


def collect_worker_metrics(directory: Path) -> bytes:
    """Return the merged metrics of all workers that answer."""
    texts = [_read_worker(path) for path in sorted(directory.glob("*.sock"))]
    return merge_expositions(text for text in texts if text is not None)


def _read_worker(path: Path) -> str | None:
    pieces = []
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(WORKER_TIMEOUT_S)
            connection.connect(str(path))
            while piece := connection.recv(65536):
                pieces.append(piece)
    except OSError:
        return None
    return b"".join(pieces).decode()


def merge_expositions(texts: Iterable[str]) -> bytes:
    """Merge Prometheus texts: samples of the same name and labels are added up."""
    registry = CollectorRegistry()
    registry.register(MergedMetrics(list(texts)))
    return generate_latest(registry)


class MergedMetrics(Collector):
    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for text in self._texts:
            for family in text_string_to_metric_families(text):
                families.setdefault(family.name, family)
                _add(values.setdefault(family.name, {}), family)
        for name, family in families.items():
            made = Metric(name, family.documentation, family.type)
            for (sample, labels), value in values[name].items():
                made.add_sample(sample, dict(labels), value)
            yield made


def _add(values: dict[tuple[str, tuple[tuple[str, str], ...]], float], family: Metric) -> None:
    for sample in family.samples:
        key = (sample.name, tuple(sample.labels.items()))
        if key not in values:
            values[key] = sample.value
        elif sample.name in MERGED_BY_MINIMUM or sample.name.endswith(CREATED):
            values[key] = min(values[key], sample.value)
        elif sample.name in MERGED_BY_MAXIMUM:
            values[key] = max(values[key], sample.value)
        else:
            values[key] += sample.value
