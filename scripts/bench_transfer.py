"""Measures what moves KV between engines: throughput, handshake, hand-over, CPU. See --help.

scripts/bench_transfer.py                      everything, some minutes
scripts/bench_transfer.py --only throughput    one section
scripts/bench_transfer.py --device cuda        KV in the memory of a GPU
"""

import os
import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[1])

if __name__ == "__main__":
    # For this process, and for those it starts: they measure this checkout.
    sys.path.insert(0, ROOT)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, os.getenv("PYTHONPATH")]))
    from scripts.transfer_bench.cli import main

    raise SystemExit(main())
