"""Measures what moves KV between engines: throughput, handshake, hand-over, CPU. See --help.

scripts/bench_transfer.py                      everything, some minutes
scripts/bench_transfer.py --only throughput    one section
scripts/bench_transfer.py --device cuda        KV in the memory of a GPU
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from scripts.transfer_bench.cli import main

    raise SystemExit(main())
