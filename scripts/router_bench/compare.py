"""Compares the figures of two files, where that means something."""

import json
import sys
from pathlib import Path
from typing import Any

from scripts.bench.errors import BenchError, NotInterleavedError


def main(first: Path, second: Path) -> int:
    """Prints the ratio to the peer in both files. Raises BenchError.

    The ratio is from runs that took turns, so it can be set beside another one; CPU times of two
    sessions cannot.
    """
    one, other = _ratios(first), _ratios(second)
    common = [name for name in one if name in other]
    if not common:
        raise NotInterleavedError(
            "no case was measured beside a peer in both files; CPU times of two sessions are not "
            "to be compared, because their runs did not take turns"
        )
    for name in common:
        sys.stdout.write(f"{name:<12} ratio to the peer {one[name]:.2f} -> {other[name]:.2f}\n")
    return 0


def _ratios(path: Path) -> dict[str, float]:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        cases = content["cases"]
        return {case["case"]: case["ratio"] for case in cases if case["ratio"] is not None}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{path}: not a file of this program: {error}") from error
