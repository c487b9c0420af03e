"""What the kernel says of processes: CPU time of each thread, peak memory."""

from dataclasses import dataclass
from pathlib import Path

NANO = 1e-9
KIBIBYTE = 1024


@dataclass(frozen=True, slots=True)
class Usage:
    """`cpu` in seconds since the start of each thread that still lives, `peak` in bytes."""

    cpu: float
    peak: int


def usage(root: int) -> Usage:
    """Of a process and all that it started, now."""
    family = [root, *_descendants(root)]
    return Usage(sum(map(_cpu, family)), sum(map(_peak, family)))


def _descendants(root: int) -> list[int]:
    found: list[int] = []
    for children in Path(f"/proc/{root}/task").glob("*/children"):
        for child in map(int, _read(children).split()):
            found += [child, *_descendants(child)]
    return found


def _cpu(pid: int) -> float:
    """The first field of schedstat is the time on a CPU, in nanoseconds."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int((_read(thread).split() or ["0"])[0]) for thread in threads) * NANO


def _peak(pid: int) -> int:
    for line in _read(Path(f"/proc/{pid}/status")).splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * KIBIBYTE
    return 0


def _read(path: Path) -> str:
    """Nothing for a process or thread that has ended meanwhile."""
    try:
        return path.read_text()
    except OSError:
        return ""
