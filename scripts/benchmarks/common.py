"""The parts that benchmarks share: errors, free ports, the machine, CPU accounting and samples.

Imports nothing outside the standard library: scripts/gpu_check.sh runs on bare machines.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import random
import socket
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any


class BenchError(Exception):
    """The measurement failed; the message is one line."""


def report_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def bench_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    layout = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(f"bench {name}", None, description, formatter_class=layout)


def positive(text: str) -> int:
    """Parse an option's positive integer."""
    if not text.isdecimal() or not int(text[:9]) > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def write_report(options: argparse.Namespace, **content: Any) -> None:
    """Write a benchmark's results and options to the file of --json, if there is one."""
    if options.json is not None:
        report = {"options": vars(options), **content}
        options.json.write_text(json.dumps(report, indent=2, default=str) + "\n")


def free_ports(count: int) -> list[int]:
    """Return different TCP ports that are free, below those of outgoing connections."""
    return list(itertools.islice(_ports, count))


def free_ports_of(ports: Sequence[int]) -> Iterator[int]:
    """Yield those of `ports` that are free, over and over, from a random one on."""
    start = random.SystemRandom().randrange(len(ports))
    return filter(_is_free, itertools.cycle([*ports[start:], *ports[:start]]))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


# tests/conftest.py gives out those from 15,000 on.
_ports = free_ports_of(range(7_100, 15_000))


def describe(*packages: str) -> dict[str, Any]:
    """Return facts that figures depend on, with the versions of `packages`.

    `load` is that of the machine at the start: it shows whether other work was running.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "load": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def cpu_seconds(root: int) -> float:
    """Return the CPU time of a process and all that it started, by the kernel's account.

    Only threads that still live count.
    """
    return sum(map(_cpu, [root, *_descendants(root)]))


def peak_bytes(root: int) -> int:
    """Return the most memory of a process and all that it started."""
    return sum(map(_peak, [root, *_descendants(root)]))


def _descendants(root: int) -> list[int]:
    found: list[int] = []
    for children in Path(f"/proc/{root}/task").glob("*/children"):
        for child in map(int, _read(children).split()):
            found += [child, *_descendants(child)]
    return found


def _cpu(pid: int) -> float:
    """Return seconds: the first field of schedstat is the time on a CPU, in nanoseconds."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int((_read(thread).split() or ["0"])[0]) for thread in threads) / 1e9


def _peak(pid: int) -> int:
    for line in _read(Path(f"/proc/{pid}/status")).splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _read(path: Path) -> str:
    """Return a file's text, or nothing if its process or thread has ended meanwhile."""
    try:
        return path.read_text()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Sample:
    """Repeated measurements of one thing, at least one."""

    values: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """The distance between the quartiles over the median: 0 on a quiet machine."""
        if len(self.values) < 4 or not self.median:
            return 0.0
        low, _, high = statistics.quantiles(self.values, n=4)
        return (high - low) / self.median

    def percentile(self, percent: float) -> float:
        """Return the smallest value that `percent` of the values do not exceed."""
        ordered = sorted(self.values)
        return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Sample:
    """Return pairwise ratios of measurements that were taken in the same rounds."""
    return Sample([one / other for one, other in zip(ours, theirs, strict=True)])
