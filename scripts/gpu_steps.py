"""Run the steps of scripts/gpu_check.sh, each a process with a deadline; print and write results.

A step that fails does not keep the others from running. Failures are: an answer that is not that of
one engine alone, KV that was not transferred, an engine that does not start, figures that could not
be measured, and a missing vLLM. A figure that misses its aim or is noisy is reported, and is a
failure with --strict only: aims were set on CPUs, and the machine may have other work.

A model of a kind that this vLLM cannot run, with any connector or none, is reported as not run,
with vLLM's reason.

Exit status: 0 all is well; 1 a step failed; 2 wrong options; 3 with --strict, an aim was missed, a
figure is noisy, or a model was not run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
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

from tests.gpu.equality import KINDS, UNABLE

EQUALITY = ("-m", "tests.gpu.equality")
LONG = "100,16000"
LONG_VLLM = "33,257,16001"
"""Whole blocks and one token, see tests/gpu/equality.py."""
LONG_KINDS = "257,1537"
"""Whole chunks and one token."""
DOUBTFUL = 3
"""Exit status of `bench.py transfer --strict` when a figure misses its aim or is noisy."""
MAX_SUMMARY = 300


@dataclass(frozen=True)
class Step:
    name: str
    arguments: Sequence[str]
    seconds: float
    """The deadline: the step is ended after it, and has failed."""
    may_doubt: bool = False
    """The step may end with the exit status DOUBTFUL."""


@dataclass(frozen=True)
class Done:
    name: str
    outcome: str
    """ok, failed, not run, or doubtful: figures that miss an aim or are noisy."""
    seconds: float
    said: str
    """The last line of its output."""
    answer: str = ""
    """Its standard output."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "bench.json").unlink(missing_ok=True)
    done: list[Done] = []
    for step in steps(options):
        print(f"== {step.name}", file=sys.stderr, flush=True)
        done.append(run(step))
        print(_line(done[-1]), file=sys.stderr, flush=True)
        _write(options, done)
    if not options.without_vllm and not has_vllm():
        done.append(Done("vLLM", "failed", 0.0, "it is not installed; or say --without-vllm"))
        _write(options, done)
    _show(done)
    print(f"written: {options.out / 'check.json'}", file=sys.stderr)
    for each in done:
        if each.outcome != "ok":
            print(f"gpu_check: {each.outcome}: {each.name}: {each.said}", file=sys.stderr)
    outcomes = {each.outcome for each in done}
    if "failed" in outcomes:
        return 1
    return DOUBTFUL if options.strict and outcomes != {"ok"} else 0


def _write(options: argparse.Namespace, done: Sequence[Done]) -> None:
    """Write the results so far, after each step: the machine may be taken away."""
    summary: dict[str, Any] = {"device": options.device, "steps": [asdict(each) for each in done]}
    bench = options.out / "bench.json"
    if bench.exists():
        summary["figures"] = json.loads(bench.read_text())
    (options.out / "check.json").write_text(json.dumps(summary, indent=2) + "\n")


def _show(done: Sequence[Done]) -> None:
    """Print outputs of several lines in full, then one line for each step."""
    for each in done:
        if "\n" in each.answer.strip():
            print(f"{each.name}\n{each.answer}")
    print(*map(_line, done), sep="\n", flush=True)


def has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None


def steps(options: argparse.Namespace) -> list[Step]:
    found: list[Step] = []
    if options.kinds:
        return _kinds(options) if has_vllm() else []
    if not options.without_reference:
        found += _reference(options)
    if not options.without_vllm and has_vllm():
        found += _vllm(options)
    if not options.without_figures:
        bench = ["scripts/bench.py", "transfer", "--device", options.device, "--strict"]
        bench += ["--json", str(options.out / "bench.json"), *options.bench.split()]
        found.append(Step("figures: bench.py transfer", bench, 1200, may_doubt=True))
    return found


def _reference(options: argparse.Namespace) -> list[Step]:
    short = ("--lengths", options.lengths) if options.lengths else ()
    long = ("--lengths", options.lengths or LONG)
    # The device's own memory, and host memory where NIXL cannot read a GPU's.
    own = "cpu" if options.device == "cpu" else "cuda"
    found = [
        _equality(options, "two engines against one", 600, *short),
        _equality(options, "pushed", 900, "--mode", "push", *long),
        _equality(options, "in the device's memory", 900, "--buffers", own, *long),
        _equality(options, "with checksums", 600, "--checksums", *short),
    ]
    if own != "cpu":
        host = ("--buffers", "cpu", *long)
        found.append(_equality(options, "through host buffers", 900, *host))
    return found


def _vllm(options: argparse.Namespace) -> list[Step]:
    """In float32 vLLM computes with Triton, in bfloat16 with FlashAttention; on a CPU alike."""
    vllm = ("--engine", "vllm", "--lengths", options.lengths or LONG_VLLM)
    dtypes = ("float32",) if options.device == "cpu" else ("float32", "bfloat16")
    return [
        _equality(options, f"vLLM, {mode}, {dtype}", 1200, *vllm, "--mode", mode, "--dtype", dtype)
        for dtype in dtypes
        for mode in ("pull", "push")
    ]


def _kinds(options: argparse.Namespace) -> list[Step]:
    """In bfloat16; on a CPU in float32, which its kernels for delta nets do not take."""
    vllm = ("--engine", "vllm", "--lengths", options.lengths or LONG_KINDS)
    found = [_equality(options, "vLLM, dense", 600, *vllm)]
    for kind in KINDS:
        is_single = options.device == "cpu" and kind != "delta nets"
        dtype = "float32" if is_single else "bfloat16"
        more = ("--kind", kind, "--dtype", dtype)
        found.append(_equality(options, f"vLLM, {kind}", 600, *vllm, *more))
    return found


def _equality(options: argparse.Namespace, name: str, seconds: float, *more: str) -> Step:
    logs = options.out / "logs" / re.sub(r"[^a-zA-Z0-9]+", "-", name)
    arguments = (*EQUALITY, "--device", options.device, *more, "--logs", str(logs))
    return Step(f"tokens: {name}", arguments, seconds)


def run(step: Step) -> Done:
    """Run a step, and pass its standard error on while it runs."""
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
    if code is None:
        late = f"it took longer than {step.seconds:g} s"
        return Done(step.name, "failed", step.seconds, late, told)
    lines = (told if code == 0 else "".join(progress) or told).strip().splitlines()
    said = lines[-1].strip()[-MAX_SUMMARY:] if lines else f"exit code {code}"
    outcomes = {0: "ok", UNABLE: "not run", DOUBTFUL: "doubtful" if step.may_doubt else "failed"}
    return Done(step.name, outcomes.get(code, "failed"), time.monotonic() - started, said, told)


def _pass_on(process: subprocess.Popen[str], kept: deque[str]) -> None:
    assert process.stderr is not None
    with process.stderr as said:
        for line in said:
            sys.stderr.write(line)
            sys.stderr.flush()
            kept.append(line)


def _end_group(process: subprocess.Popen[str]) -> None:
    """Kill what a step has left behind."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _line(done: Done) -> str:
    return f"{done.outcome:8} {done.seconds:7.1f} s  {done.name:34} {done.said}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cpu, cuda or cuda:N")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="a folder")
    parser.add_argument("--lengths", default="", help="of all prompts, in tokens: 33,100")
    parser.add_argument("--bench", default="", help="options of bench.py transfer")
    parser.add_argument("--kinds", action="store_true", help="only a vLLM model of each kind")
    parser.add_argument("--without-reference", action="store_true", help="no engines of ours")
    parser.add_argument("--without-vllm", action="store_true", help="even where it is installed")
    parser.add_argument("--without-figures", action="store_true", help="answers alone")
    parser.add_argument("--strict", action="store_true", help="exit 3: see above")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
