"""Measure this project: `python scripts/bench.py COMMAND [options]`, see `COMMAND --help`.

router       CPU time of the router per request, beside other routers
transfer     moving KV between two engines: throughput, handshake, hand-over, CPU
multiturn    time to the first token of a conversation's second turn
push         push mode beside pull mode
first-token  a prefiller's own first token, handed over or sampled again
compare      one engine, and a prefill and a decode engine with as many threads
reconcile    what a fleet that changes costs the event loop
fleet        routing policies in a simulated fleet
retention    how long turns stay in caches: LRU, leases, exact knowledge of the future
field        this router's choices of engines beside Dynamo's and vllm-router's
step-budget  how long prompts delay running answers, at engines that run
vllm-scheduler  what our connector costs vLLM's scheduler process, beside stock
chaos        what clients see while engines and routers fail under load
"""

import importlib
import os
import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[1])
MODULES = {
    "router": "scripts.benchmarks.router",
    "transfer": "scripts.benchmarks.transfer.command",
    "multiturn": "scripts.benchmarks.latency",
    "push": "scripts.benchmarks.latency",
    "first-token": "scripts.benchmarks.latency",
    "compare": "scripts.benchmarks.compare",
    "reconcile": "scripts.benchmarks.reconcile",
    "fleet": "scripts.benchmarks.fleet",
    "retention": "scripts.benchmarks.retention",
    "field": "scripts.benchmarks.field",
    "vllm-scheduler": "scripts.benchmarks.vllm_scheduler",
    "step-budget": "tests.vllm.gaps",
    "chaos": "tests.chaos.command",
}


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in MODULES:
        is_help = sys.argv[1:] in (["-h"], ["--help"])
        print(__doc__, file=sys.stdout if is_help else sys.stderr)
        return 0 if is_help else 2
    name, arguments = sys.argv[1], sys.argv[2:]
    module = importlib.import_module(MODULES[name])
    if MODULES[name].endswith("latency"):
        arguments = [name, *arguments]
    code: int = module.main(arguments)
    return code


if __name__ == "__main__":
    # This process and those that it starts measure this checkout.
    sys.path[0] = ROOT
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, os.getenv("PYTHONPATH")]))
    raise SystemExit(main())
