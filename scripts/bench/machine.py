"""What a figure was measured on."""

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any


def describe(*packages: str) -> dict[str, Any]:
    """Facts that figures depend on, with the versions of `packages`.

    The load at the start tells whether others were there.
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


def accelerator(device: str) -> str:
    """`device` is torch's name of one, or "cpu"."""
    if device == "cpu":
        return "none"
    import torch

    return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"


def available_bytes() -> int:
    """Host memory that can be had without pushing anyone out."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
