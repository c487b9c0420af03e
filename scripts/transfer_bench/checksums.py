"""What `kv_checksum` costs: CPU per gigabyte that one core sums up, and how much longer loads take.

Each side of a transfer sums up once: the holder beside the READ, the reader afterwards.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

from engine_ext.base.types import CacheGeometry
from engine_ext.transfer.checksums import Checksums, HostBlocks
from scripts.bench.errors import BenchError
from scripts.transfer_bench.actor import Actor
from scripts.transfer_bench.engine import BLOCK_SIZE, BenchEngine, EngineSpec, both_sides
from scripts.transfer_bench.memory import Shape
from scripts.transfer_bench.report import Report, Row
from scripts.transfer_bench.sample import Sample

SECTION = "checksum: summing up blocks on one core, and loads with and without"
GIGA = 1e9
MOST_BLOCKS = 1024


class Side(BenchEngine):
    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self.stamp(1)

    def sum_up(self, blocks: Sequence[int]) -> float:
        """Seconds of CPU."""
        checksums = Checksums(self.regions, CacheGeometry(BLOCK_SIZE, len(blocks)), HostBlocks())
        started = time.thread_time()
        checksums.lease("all", (tuple(blocks),))
        while checksums.is_busy:
            checksums.step()
        return time.thread_time() - started

    def num_verified(self) -> int:
        return self.connector.worker.stats().loads_verified


def measure(report: Report, shape: Shape, num_blocks: Sequence[int], rounds: int) -> None:
    """In host memory, which is that of four engines: of `MOST_BLOCKS` at most."""
    num_blocks = sorted({min(count, MOST_BLOCKS) for count in num_blocks})
    shape = replace(shape, blocks=max(num_blocks))
    pairs = [both_sides(shape, "cpu") for _ in range(2)]
    spec_p, spec_d = (replace(spec, checksums=True) for spec in pairs[1])
    with (
        Actor(Side, pairs[0][0]) as plain_p,
        Actor(Side, pairs[0][1]) as plain_d,
        Actor(Side, spec_p) as holder,
        Actor(Side, spec_d) as reader,
    ):
        for count in num_blocks:
            report.say(f"checksum: {count} blocks")
            blocks, size = list(range(count)), shape.moved_bytes(count) / GIGA
            cpu = Sample.of([plain_p.call(Side.sum_up, blocks) for _ in range(rounds)])
            figures = {"core_seconds/GB": cpu.median / size, "GB/s": size / cpu.median}
            report.add(Row(SECTION, f"{count} blocks summed up", figures, rounds, cpu.spread))
            plain, checked = [], []
            for index in range(rounds + 1):  # the first is not counted
                plain.append(_load(plain_p, plain_d, f"{count}-{index}", blocks))
                checked.append(_load(holder, reader, f"{count}-{index}", blocks))
            without, within = Sample.of(plain[1:]), Sample.of(checked[1:])
            figures = {
                "without_ms": without.median * 1e3,
                "with_ms": within.median * 1e3,
                "more_s/GB": (within.median - without.median) / size,
            }
            report.add(Row(SECTION, f"{count} blocks loaded", figures, rounds, within.spread))
        if reader.call(Side.num_verified) != len(num_blocks) * (rounds + 1):
            raise BenchError("some loads were not verified")


def _load(holder: Actor[Side], reader: Actor[Side], name: str, blocks: list[int]) -> float:
    params = holder.call(Side.prefill, f"p-{name}", blocks).params
    seconds = reader.call(Side.load, f"d-{name}", params, blocks).seconds
    holder.call(Side.drain)
    return seconds
