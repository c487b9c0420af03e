"""Metrics of several worker processes as those of one router.

Each worker tells its figures to whoever connects to its Unix socket, from a thread; whoever is
asked for metrics asks them all and adds up. A worker that is gone is left out, and its counts with
it: to Prometheus that is a counter's reset.
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
PATIENCE = 2.0
# What does not add up: the worst that any worker sees is what counts.
LEAST = frozenset(
    (
        "disagg_router_certificate_end_timestamp_seconds",
        "disagg_router_engine_healthy",
        "disagg_router_group_engines",
        "disagg_router_group_weight",
        "disagg_router_source_engines",
        "disagg_router_source_told_timestamp_seconds",
    )
)
MOST = frozenset(
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


class Teller(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

    def __init__(self, path: Path, exposition: Exposition) -> None:
        self.exposition = exposition
        super().__init__(str(path), Telling)


class Telling(socketserver.BaseRequestHandler):
    server: Teller

    def handle(self) -> None:
        self.request.settimeout(PATIENCE)
        self.request.sendall(self.server.exposition())


@contextlib.contextmanager
def telling(path: Path, exposition: Exposition) -> Iterator[None]:
    """Tells this worker's figures at `path` until the block ends."""
    path.unlink(missing_ok=True)  # of a worker that was killed
    with Teller(path, exposition) as server:
        threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()
            path.unlink(missing_ok=True)


def family_exposition(directory: Path) -> bytes:
    """The figures of all workers that answer."""
    told = [ask(path) for path in sorted(directory.glob("*.sock"))]
    return merged(text for text in told if text is not None)


def ask(path: Path) -> str | None:
    pieces = []
    try:
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(PATIENCE)
            asking.connect(str(path))
            while piece := asking.recv(65536):
                pieces.append(piece)
    except OSError:
        return None
    return b"".join(pieces).decode()


def merged(texts: Iterable[str]) -> bytes:
    """One exposition out of several: samples of the same name and labels are added up."""
    registry = CollectorRegistry()
    registry.register(Merged(list(texts)))
    return generate_latest(registry)


class Merged(Collector):
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
        elif sample.name in LEAST or sample.name.endswith(CREATED):
            values[key] = min(values[key], sample.value)
        elif sample.name in MOST:
            values[key] = max(values[key], sample.value)
        else:
            values[key] += sample.value
