"""What scripts/gpu_check.sh does once all is installed: steps, each of which is a process with a
deadline; then a table, and the same as JSON. One that fails keeps none of the others from running.

Exit codes: 0 all is well, 1 a step failed, 2 wrong options.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

EQUALITY = ("-m", "scripts.transfer_bench.equality")
LONG = "100,16000"
LAST_WORDS = 300


@dataclass(frozen=True)
class Step:
    name: str
    arguments: tuple[str, ...]
    seconds: float
    """After which it is ended, and has failed."""


@dataclass(frozen=True)
class Done:
    name: str
    outcome: str
    """ok, failed or skipped."""
    seconds: float
    said: str


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    answers = options.out / "answers.txt"
    answers.unlink(missing_ok=True)
    done: list[Done] = []
    for step in steps(options):
        print(f"== {step.name}", file=sys.stderr, flush=True)
        done.append(run(step, answers))
        print(_line(done[-1]), flush=True)
    if not options.without_vllm and importlib.util.find_spec("vllm") is None:
        done.append(Done("vLLM", "skipped", 0.0, "it is not installed beside this Python"))
        print(_line(done[-1]), flush=True)
    summary: dict[str, Any] = {"device": options.device, "steps": [asdict(each) for each in done]}
    bench = options.out / "bench.json"
    if bench.exists():
        summary["figures"] = json.loads(bench.read_text())
    (options.out / "check.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(f"written: {options.out / 'check.json'}", file=sys.stderr)
    failed = [each for each in done if each.outcome == "failed"]
    for each in failed:
        print(f"gpu_check: failed: {each.name}: {each.said}", file=sys.stderr)
    return 1 if failed else 0


def steps(options: argparse.Namespace) -> list[Step]:
    device = ("--device", options.device)
    short = ("--lengths", options.lengths) if options.lengths else ()
    long = ("--lengths", options.lengths or LONG)
    # What NIXL may touch of a GPU's KV without help; where it cannot, a mirror in host memory.
    own = "cpu" if options.device == "cpu" else "cuda"
    found = [
        Step("tokens: two engines against one", (*EQUALITY, *device, *short), 600),
        Step("tokens: in the device's memory", (*EQUALITY, *device, *long, "--buffers", own), 900),
    ]
    if own != "cpu":
        host = (*EQUALITY, *device, *long, "--buffers", "cpu")
        found.append(Step("tokens: through host buffers", host, 900))
    if not options.without_vllm and importlib.util.find_spec("vllm") is not None:
        vllm = (*EQUALITY, *device, "--engine", "vllm")
        found.append(Step("tokens: vLLM", (*vllm, *long), 1800))
    if options.bench != "none":
        file = str(options.out / "bench.json")
        (options.out / "bench.json").unlink(missing_ok=True)
        bench = ("scripts/bench_transfer.py", *device, "--json", file, *options.bench.split())
        found.append(Step("figures: bench_transfer.py", bench, 1200))
    return found


def run(step: Step, said_by_all: Path) -> Done:
    """What it says of its progress is passed on at once; its answer goes into the file, too."""
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as answer:
        process = subprocess.Popen(
            [sys.executable, *step.arguments],
            stdout=answer,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # with the engines that it starts
        )
        progress: deque[str] = deque(maxlen=20)
        passing = threading.Thread(target=_pass_on, args=(process, progress), daemon=True)
        passing.start()
        try:
            code = process.wait(step.seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_group(process)
        passing.join(10)
        answer.seek(0)
        told = answer.read()
    with said_by_all.open("a") as file:
        file.write(f"== {step.name}\n{told}\n")
    if code is None:
        return Done(step.name, "failed", step.seconds, f"it took longer than {step.seconds:g} s")
    lines = (told if code == 0 else "".join(progress) or told).strip().splitlines()
    said = lines[-1][-LAST_WORDS:] if lines else f"exit code {code}"
    return Done(step.name, "failed" if code else "ok", time.monotonic() - started, said)


def _pass_on(process: subprocess.Popen[str], kept: deque[str]) -> None:
    assert process.stderr is not None
    with process.stderr as said:
        for line in said:
            sys.stderr.write(line)
            sys.stderr.flush()
            kept.append(line)


def _end_group(process: subprocess.Popen[str]) -> None:
    """Also what a step that failed has left behind."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _line(done: Done) -> str:
    return f"{done.outcome:8} {done.seconds:7.1f} s  {done.name:36} {done.said}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cpu, cuda or cuda:N")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="a folder")
    parser.add_argument("--lengths", default="", help="of all prompts, in tokens: 33,100")
    parser.add_argument("--bench", default="", help="options of bench_transfer.py, or none")
    parser.add_argument("--without-vllm", action="store_true", help="even where it is installed")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
