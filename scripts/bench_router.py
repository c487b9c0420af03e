"""Measures what a request costs in the router, beside a peer in the same run. See --help.

scripts/bench_router.py                                     every case, about three minutes
scripts/bench_router.py --peer vllm-router                  with ratios to the Rust router
scripts/bench_router.py --only unary burst --rounds 3       two cases, quickly
"""

import os
import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[1])

if __name__ == "__main__":
    # For this process, and for those it starts: they measure this checkout.
    sys.path.insert(0, ROOT)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, os.getenv("PYTHONPATH")]))
    from scripts.router_bench.cli import main

    raise SystemExit(main())
