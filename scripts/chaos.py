"""Breaks engines and routers under load, and counts what clients see of it. See --help.

scripts/chaos.py                                   every scenario, about four minutes
scripts/chaos.py --short --check                   the short form, as the tests run it
scripts/chaos.py --peer vllm-router --json FILE    the same against the Rust router
scripts/chaos.py --compare NAME=FILE NAME=FILE     a table of what files say
"""

import os
import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[1])

if __name__ == "__main__":
    # For this process, and for those it starts: they break this checkout.
    sys.path.insert(0, ROOT)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, os.getenv("PYTHONPATH")]))
    from scripts.chaos_bench.cli import main

    raise SystemExit(main())
