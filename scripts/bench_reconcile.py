"""Measures what a fleet that comes and goes costs the event loop. See --help."""

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[1])

if __name__ == "__main__":
    sys.path.insert(0, ROOT)
    from scripts.bench.reconcile import main

    raise SystemExit(main())
