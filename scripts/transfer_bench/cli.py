"""The command line of scripts/bench_transfer.py."""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripts.bench.errors import BenchError
from scripts.bench.machine import accelerator, available_bytes, describe
from scripts.transfer_bench.memory import Shape
from scripts.transfer_bench.report import Report

PROGRAM = "bench_transfer"
SECTIONS = (
    "throughput",
    "copy",
    "checksum",
    "handshake",
    "handover",
    "step",
    "request",
    "idle",
)
KIBIBYTE = 1024
MEMORY_SHARE = 0.7
"""Most of the free memory that the two sides together may take."""


def main(arguments: Sequence[str] | None = None) -> int:
    """0: measured; 1: could not measure all; 2: wrong options; 3: --strict, and noisy or missed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    os.environ.setdefault("UCX_NET_DEVICES", "all")  # UCX otherwise looks for RDMA devices only.
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    try:
        _check_memory(options)
    except BenchError as error:
        sys.stderr.write(f"{PROGRAM}: error: {error}\n")
        return 1
    report = Report(_machine(options.device), _plain(options), options.max_spread)
    report.header()
    with tempfile.TemporaryDirectory() as directory:
        sections = _sections(report, options, options.logs or Path(directory))
        measure(report, {name: sections[name] for name in options.only or SECTIONS}, options.json)
    return _conclude(report, options)


def measure(report: Report, sections: Mapping[str, Callable[[], None]], file: Path | None) -> None:
    """One that fails keeps none of the others from being measured, nor from being written: each is
    at once, for the next may never end."""
    for name, section in sections.items():
        try:
            section()
        except BenchError as error:
            report.say(f"{PROGRAM}: error: {name}: {error}")
            report.failed.append(name)
        if file is not None:
            file.write_text(report.to_json())


def _sections(
    report: Report, options: argparse.Namespace, directory: Path
) -> dict[str, Callable[[], None]]:
    # Late: NIXL's bindings import torch, and --help should not wait for that.
    from scripts.transfer_bench import (
        checksums,
        copying,
        handover,
        handshake,
        idle,
        stepping,
        throughput,
    )

    device, rounds = options.device, options.rounds
    block_bytes = options.block_kib * KIBIBYTE
    most = Shape(options.layers, max(options.blocks), block_bytes)
    cache = replace(most, blocks=most.blocks + 64)
    small = Shape(options.layers, max(options.handover_blocks) + 1, block_bytes)
    tiny = Shape(2, 64, 4096)
    return {
        "throughput": lambda: throughput.measure(
            report, throughput.Options(cache, device, options.blocks, rounds, options.seed)
        ),
        "copy": lambda: copying.measure(report, most, device, options.blocks, rounds),
        "checksum": lambda: checksums.measure(report, most, options.blocks, rounds),
        "handshake": lambda: handshake.measure(
            report, device, options.layers, options.descriptors, rounds
        ),
        "handover": lambda: handover.measure(
            report,
            handover.Options(
                small, device, options.handover_blocks, options.requests, options.prefill_seconds
            ),
        ),
        "step": lambda: stepping.measure(report, tiny, options.tracked, rounds),
        "request": lambda: stepping.measure_requests(report, tiny, options.blocks, rounds),
        "idle": lambda: idle.measure(
            report,
            idle.Options(tiny, max(options.tracked), rounds, options.idle_seconds, directory),
        ),
    }


def _conclude(report: Report, options: argparse.Namespace) -> int:
    if options.json is not None:
        report.say(f"written: {options.json}")
    for row in report.misses:
        report.say(f"missed: {row.section}: {row.case}: aim {row.aim}")
    if report.noisy:
        report.say(
            f"NOISY: some rounds differ by more than {report.max_spread:.0%}; those figures are "
            "not to be compared: run again on a quiet machine"
        )
    if report.failed:
        report.say(f"not measured: {', '.join(report.failed)}")
        return 1
    if not options.strict or not (report.noisy or report.misses):
        return 0
    rows, missed, noisy = map(len, (report.rows, report.misses, report.noisy))
    report.say(f"of {rows} rows {missed} missed an aim, {noisy} are noisy")
    return 3


def _check_memory(options: argparse.Namespace) -> None:
    needed = needed_bytes(options)
    if options.device != "cpu" or not needed:
        return
    limit = MEMORY_SHARE * available_bytes()
    if needed > limit:
        raise BenchError(
            f"the two sides need {needed / 2**30:.1f} GiB of {limit / 2**30:.1f} GiB that may be "
            "taken; lower --layers, --block-kib or --blocks"
        )


def needed_bytes(options: argparse.Namespace) -> int:
    """Of both sides, in that section for which most is made; the small ones are not counted."""
    most = max(options.blocks)
    sides = {"throughput": 2 * (most + 64), "copy": 3 * most, "checksum": 4 * min(most, 1024)}
    blocks = max(sides.get(name, 0) for name in options.only or SECTIONS)
    return int(blocks * options.layers * options.block_kib * KIBIBYTE)


def _machine(device: str) -> dict[str, Any]:
    return describe("nixl", "torch") | {"accelerator": accelerator(device)}


def _plain(options: argparse.Namespace) -> dict[str, Any]:
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(options).items()
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Measures KV transfers between two processes. Variants that are compared take "
        "turns, every figure is a median, and rounds that disagree are flagged as NOISY.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=SECTIONS, metavar="SECTION", help=", ".join(SECTIONS))
    add("--device", default="cpu", help="cpu, cuda or cuda:N: where the KV is")
    add("--rounds", type=positive, default=11, help="repetitions of each measurement")
    add("--layers", type=positive, default=28, help="regions")
    add("--block-kib", type=positive, default=64, help="KiB per block and layer")
    add("--blocks", type=_counts, default="16,256,2048", help="blocks per transfer")
    add("--descriptors", type=_counts, default="1000,1000000", help="layers x blocks to prepare")
    add("--handover-blocks", type=_counts, default="1,16", help="blocks per hand-over")
    add("--requests", type=positive, default=100, help="hand-overs")
    add("--prefill-seconds", type=float, default=0.3, help="P's forward pass in push mode")
    add("--tracked", type=_counts, default="0,100,1000", help="requests tracked during steps")
    add("--idle-seconds", type=float, default=3.0, help="length of one CPU measurement")
    add("--max-spread", type=float, default=0.25, help="quartile distance over median")
    add("--seed", type=int, default=0, help="of the random block ids")
    add("--json", type=Path, metavar="FILE", help="also write the figures there")
    add("--logs", type=Path, metavar="DIR", help="keep the reference engine's log there")
    add("--strict", action="store_true", help="exit 3 when a figure is noisy or misses its aim")
    return parser


def positive(text: str) -> int:
    if not text.isdecimal() or not int(text[:9]) > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text[:9])


def _counts(text: str) -> tuple[int, ...]:
    if not all(part.isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers like 16,256")
    return tuple(int(part[:9]) for part in text.split(","))
