import itertools
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from engine_ext.common.log_rate_limit import LogRateLimit
from router.telemetry.logs import LineHandler
from scripts.benchmarks.common import free_ports_of

# UCX otherwise looks for RDMA devices only.
os.environ.setdefault("UCX_NET_DEVICES", "all")
os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
# Decode engines with tiny models would compute most prompts themselves, and no KV would move.
os.environ["DISAGG_ROUTER_TARGET_ITL"] = "0"
# A busy machine is not a property that failed. The same examples each time: what a new one finds is
# no fault of the change that CI tests. `make test-nightly` draws others.
settings.register_profile(
    "any machine",
    deadline=None,
    derandomize=not os.environ.get("DISAGG_NEW_EXAMPLES"),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("any machine")


LOWEST_PORT, HIGHEST_PORT = 15_000, 32_000
"""Below those that outgoing connections are given: one of these may take a port that was free a
moment ago, and a server that is killed finds its own taken when it comes back."""


def _own_ports() -> Iterator[int]:
    """This test process's share of them, as far as they are free: one range, for an engine may take
    the port behind one that it was given."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    size = (HIGHEST_PORT - LOWEST_PORT) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    lowest = LOWEST_PORT + worker * size
    return free_ports_of(range(lowest, lowest + size))


_ports = _own_ports()


def find_free_ports(count: int) -> list[int]:
    """Ports nobody listened on a moment ago, all different."""
    return list(itertools.islice(_ports, count))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of tests/integration is `slow`: real engines, many of them started for one test."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent / "integration"):
            item.add_marker(pytest.mark.slow)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name a test when it fails: a run that is ended from outside prints no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        sys.stderr.write(f"\nfailed: {report.nodeid}\n")


@pytest.fixture(autouse=True)
def no_test_changes_what_the_next_one_logs() -> Iterator[None]:
    for logger in logging.root.manager.loggerDict.values():
        for one in getattr(logger, "filters", ()):
            if isinstance(one, LogRateLimit):
                one.clear()
    yield
    for handler in [*logging.root.handlers]:  # of a command that ran in this process
        if isinstance(handler, LineHandler):
            logging.root.removeHandler(handler)
