"""Measure KV transfers between two processes, with real NIXL.

    python scripts/bench.py transfer                      everything, some minutes
    python scripts/bench.py transfer --only throughput    one section
    python scripts/bench.py transfer --device cuda        KV in the memory of a GPU

Variants that are compared take turns, figures are medians, and rounds that disagree are flagged as
NOISY. Exit status: 0 measured; 1 could not measure all; 2 wrong options; 3 with --strict, noisy or
an aim was missed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.benchmarks.common import (
    BenchError,
    bench_parser,
    describe,
    positive,
    report_progress,
    write_report,
)
from scripts.benchmarks.transfer.report import Report

SECTIONS = ("throughput", "copy", "checksum", "handshake", "handover", "step")
MAX_MEMORY_SHARE = 0.7
"""The share of the free memory that both sides together may take."""


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    os.environ.setdefault("UCX_NET_DEVICES", "all")  # UCX otherwise looks for RDMA devices only.
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    needed, limit = needed_bytes(options), MAX_MEMORY_SHARE * _available_bytes()
    if options.device == "cpu" and needed > limit:
        print(
            f"bench transfer: error: both sides need {needed / 2**30:.1f} GiB of "
            f"{limit / 2**30:.1f} GiB that they may take; lower --layers, --block-kib or --blocks",
            file=sys.stderr,
        )
        return 1
    from scripts.benchmarks.transfer import sections  # Late: NIXL's bindings import torch.

    machine = describe("nixl", "torch") | {"accelerator": _accelerator(options.device)}
    report = Report(options.max_spread)
    print("machine:", ", ".join(f"{key} {value}" for key, value in machine.items()), flush=True)
    for name in options.only or SECTIONS:
        try:
            sections.SECTIONS[name](report, options)
        except BenchError as error:
            report_progress(f"bench transfer: error: {name}: {error}")
            report.failed.append(name)
        # At once: the next section may never end.
        write_report(options, machine=machine, failed=report.failed, rows=report.plain_rows())
    return _conclude(report, options)


def _conclude(report: Report, options: argparse.Namespace) -> int:
    missed = [row for row in report.rows if row.is_missed]
    for row in missed:
        report_progress(f"missed: {row.section}: {row.case}: aim {row.aim}")
    if report.noisy:
        report_progress("NOISY: those figures are not to be compared: run on a quiet machine")
    if report.failed:
        report_progress(f"not measured: {', '.join(report.failed)}")
        return 1
    if not options.strict or not (report.noisy or missed):
        return 0
    counts = (len(report.rows), len(missed), len(report.noisy))
    report_progress("of {} rows {} missed an aim, {} are noisy".format(*counts))
    return 3


def needed_bytes(options: argparse.Namespace) -> int:
    """Return the memory of both sides in the section that takes most."""
    most = max(options.blocks)
    sides = {"throughput": 2 * (most + 64), "copy": 3 * most, "checksum": 4 * min(most, 1024)}
    blocks = max(sides.get(name, 0) for name in options.only or SECTIONS)
    return int(blocks * options.layers * options.block_kib * 1024)


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _accelerator(device: str) -> str:
    if device == "cpu":
        return "none"
    import torch

    return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser("transfer", __doc__)
    add = parser.add_argument
    add("--only", nargs="+", choices=SECTIONS, metavar="SECTION", help=", ".join(SECTIONS))
    add("--device", default="cpu", help="cpu, cuda or cuda:N: where the KV is")
    add("--rounds", type=positive, default=11, help="repetitions of each measurement (11)")
    add("--layers", type=positive, default=28, help="regions (28)")
    add("--block-kib", type=positive, default=64, help="KiB per block and layer (64)")
    add("--blocks", type=_counts, default="16,256,2048", help="per transfer (16,256,2048)")
    add("--descriptors", type=_counts, default="1000,1000000", help="layers x blocks to prepare")
    add("--handover-blocks", type=_counts, default="1,16", help="blocks per hand-over (1,16)")
    add("--requests", type=positive, default=100, help="hand-overs (100)")
    add("--prefill-seconds", type=float, default=0.3, help="P's forward pass in push mode (0.3)")
    add("--tracked", type=_counts, default="0,100,1000", help="requests tracked during steps")
    add("--idle-seconds", type=float, default=3.0, help="of one measurement of idle CPU (3)")
    add("--max-spread", type=float, default=0.25, help="quartile distance over median (0.25)")
    add("--seed", type=int, default=0, help="of the random block ids (0)")
    add("--json", type=Path, metavar="FILE", help="also write the figures there")
    add("--strict", action="store_true", help="exit 3 when a figure is noisy or misses its aim")
    return parser


def _counts(text: str) -> tuple[int, ...]:
    if not all(part.isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers like 16,256")
    return tuple(int(part[:9]) for part in text.split(","))
