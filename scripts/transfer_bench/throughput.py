"""GB/s through the connector, in alternation with raw NIXL over the same memory."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine_ext.base.config import ConnectorConfig
from scripts.bench.errors import BenchError
from scripts.transfer_bench.actor import Actor
from scripts.transfer_bench.engine import BenchEngine, EngineSpec, both_sides
from scripts.transfer_bench.memory import Shape
from scripts.transfer_bench.raw import Extent, RawSide
from scripts.transfer_bench.report import Aim, Report, Row
from scripts.transfer_bench.sample import Sample, ratios

SECTION = "throughput: READ through the connector, from the order to its report"
ORDERS = ("ascending", "descending", "random")
AIM = Aim("of_raw_one", 0.9, at_least=True)
AIM_FROM_BLOCKS = 256
GIGA = 1e9


class Side(BenchEngine):
    """An engine, and raw NIXL beside it."""

    def __init__(self, spec: EngineSpec, seed: int) -> None:
        super().__init__(spec)
        self.memory.stamp(seed)
        threads = ConnectorConfig(engine_id=spec.name).num_threads
        self.raw = RawSide(self.memory, spec.shape, threads)

    def raw_metadata(self) -> bytes:
        return self.raw.metadata()

    def raw_serve(self) -> None:
        self.raw.serve()

    def raw_meet(self, metadata: bytes) -> None:
        self.raw.meet(metadata)

    def raw_one(self, num_blocks: int) -> list[Extent]:
        return self.raw.one(num_blocks)

    def raw_per_region(self, num_blocks: int) -> list[Extent]:
        return self.raw.per_region(num_blocks)

    def raw_read_one(self, num_blocks: int, remote: list[Extent]) -> float:
        return self.raw.read(self.raw.one(num_blocks), remote)

    def raw_read_regions(self, num_blocks: int, remote: list[Extent]) -> float:
        return self.raw.read(self.raw.per_region(num_blocks), remote)

    def close(self) -> None:
        self.raw.close()
        super().close()


@dataclass(frozen=True, slots=True)
class Options:
    shape: Shape
    device: str
    num_blocks: Sequence[int]
    rounds: int
    seed: int = 0


def measure(report: Report, options: Options) -> None:
    spec_p, spec_d = both_sides(options.shape, options.device)
    size = options.shape.total_bytes / 2**30
    report.say(f"throughput: two processes of {size:.2f} GiB each")
    with Actor(Side, spec_p, 1) as holder, Actor(Side, spec_d, 2) as reader:
        holder.call(Side.raw_serve)
        reader.call(Side.raw_meet, holder.call(Side.raw_metadata))
        pair = _Pair(holder, reader, options)
        for num_blocks in options.num_blocks:
            for order in ORDERS:
                report.say(f"throughput: {num_blocks} blocks, {order}")
                report.add(pair.compare(num_blocks, order))


class _Pair:
    def __init__(self, holder: Actor[Side], reader: Actor[Side], options: Options) -> None:
        self._holder = holder
        self._reader = reader
        self._options = options
        self._random = random.Random(options.seed)
        self._count = 0

    def compare(self, num_blocks: int, order: str) -> Row:
        variants: dict[str, Callable[[], float]] = {
            "connector": lambda: self._connector(num_blocks, order),
            "raw_one": lambda: self._raw_one(num_blocks),
            "raw_regions": lambda: self._raw_regions(num_blocks),
        }
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        for run in variants.values():
            run()
        self._check(num_blocks, order)
        names = list(variants)
        for index in range(self._options.rounds):
            for name in names[index % 3 :] + names[: index % 3]:
                seconds[name].append(variants[name]())
        return self._row(num_blocks, order, seconds)

    def _row(self, num_blocks: int, order: str, seconds: dict[str, list[float]]) -> Row:
        moved = self._options.shape.moved_bytes(num_blocks) / GIGA
        figures = {f"{name}_GB/s": moved / Sample.of(s).median for name, s in seconds.items()}
        one = ratios(seconds["raw_one"], seconds["connector"])
        figures["of_raw_one"] = one.median
        figures["of_raw_regions"] = ratios(seconds["raw_regions"], seconds["connector"]).median
        aimed = num_blocks >= AIM_FROM_BLOCKS and order != "random"
        rounds, aim = self._options.rounds, AIM if aimed else None
        return Row(SECTION, f"{num_blocks} blocks {order}", figures, rounds, one.spread, aim)

    def _connector(self, num_blocks: int, order: str) -> float:
        remote, local = self._ids(num_blocks, order), self._ids(num_blocks, order)
        return self._load(remote, local)

    def _load(self, remote: list[int], local: list[int]) -> float:
        self._count += 1
        granted = self._holder.call(Side.prefill, f"p-{self._count}", remote)
        loaded = self._reader.call(Side.load, f"d-{self._count}", granted.params, local)
        self._holder.call(Side.drain)
        return loaded.seconds

    def _check(self, num_blocks: int, order: str) -> None:
        """A fast transfer of the wrong bytes is none."""
        remote, local = self._ids(num_blocks, order), self._ids(num_blocks, order)
        self._load(remote, local)
        expected = self._holder.call(Side.marks, remote)
        if (self._reader.call(Side.marks, local) != expected).any():
            raise BenchError(f"{num_blocks} blocks, {order}: other bytes arrived than were sent")

    def _raw_one(self, num_blocks: int) -> float:
        remote = self._holder.call(Side.raw_one, num_blocks)
        return self._reader.call(Side.raw_read_one, num_blocks, remote)

    def _raw_regions(self, num_blocks: int) -> float:
        remote = self._holder.call(Side.raw_per_region, num_blocks)
        return self._reader.call(Side.raw_read_regions, num_blocks, remote)

    def _ids(self, num_blocks: int, order: str) -> list[int]:
        pool = self._options.shape.blocks
        if order == "random":
            return self._random.sample(range(pool), num_blocks)
        first = self._random.randrange(pool - num_blocks + 1)
        ids = list(range(first, first + num_blocks))
        return ids if order == "ascending" else ids[::-1]
