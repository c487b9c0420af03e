"""Compares the policies that choose engines, in a simulated fleet. See --help."""

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[1])

if __name__ == "__main__":
    sys.path.insert(0, ROOT)
    from scripts.fleet_sim.cli import main

    raise SystemExit(main())
