"""What a READ through the connector takes of two other things: a copy by the device itself, and a
thread of the engine that computes in Python meanwhile, for the connector's thread needs the
interpreter's lock now and then."""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from scripts.transfer_bench.actor import Actor
from scripts.transfer_bench.engine import BenchEngine, EngineSpec, both_sides
from scripts.transfer_bench.memory import Shape
from scripts.transfer_bench.report import Report, Row
from scripts.transfer_bench.sample import Sample

SECTION = "copy: READ between two processes against a copy within one, and what runs beside it"
GIGA = 1e9
SPIN_SECONDS = 0.2
"""How long the loop is counted alone."""


class Side(BenchEngine):
    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self.stamp(1)  # pages that nobody has written are all the same one

    def copy(self, num_bytes: int) -> float:
        return self.memory.copy(num_bytes)

    def spin(self, seconds: float) -> float:
        """Turns a second of a loop in Python, with nothing beside it."""
        spinner = Spinner()
        time.sleep(seconds)
        return spinner.stop()

    def load_beside(
        self, request_id: str, params: dict[str, object], blocks: Sequence[int]
    ) -> tuple[float, float]:
        """Seconds of a load, and turns a second of a loop beside it."""
        spinner = Spinner()
        seconds = self.load(request_id, params, blocks).seconds
        return seconds, spinner.stop()


class Spinner:
    """A thread that holds the interpreter's lock whenever it can get it."""

    def __init__(self) -> None:
        self._turns = 0
        self._stop = False
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> float:
        """Turns a second so far."""
        seconds = time.monotonic() - self._started
        turns, self._stop = self._turns, True
        self._thread.join()
        return turns / seconds

    def _run(self) -> None:
        while not self._stop:
            self._turns += 1


def measure(
    report: Report, shape: Shape, device: str, num_blocks: Sequence[int], rounds: int
) -> None:
    """`shape` is the holder's; the reader's is twice as large, for the copy within it."""
    spec_p, spec_d = both_sides(shape, device)
    spec_d = replace(spec_d, shape=replace(shape, blocks=2 * shape.blocks))
    with Actor(Side, spec_p) as holder, Actor(Side, spec_d) as reader:
        for count in num_blocks:
            report.say(f"copy: {count} blocks")
            report.add(_row(holder, reader, shape, count, rounds))


def _row(holder: Actor[Side], reader: Actor[Side], shape: Shape, count: int, rounds: int) -> Row:
    blocks, moved = list(range(count)), shape.moved_bytes(count)
    reads, copies, busy, rates = [], [], [], []
    for index in range(rounds + 1):  # the first is not counted
        for beside in (False, True):
            name = f"{count}-{index}-{beside}"
            params = holder.call(Side.prefill, f"p-{name}", blocks).params
            if beside:
                seconds, rate = reader.call(Side.load_beside, f"d-{name}", params, blocks)
                busy.append(seconds)
                rates.append(rate / reader.call(Side.spin, SPIN_SECONDS))
            else:
                reads.append(reader.call(Side.load, f"d-{name}", params, blocks).seconds)
            holder.call(Side.drain)
        copies.append(reader.call(Side.copy, moved))
    read, copied = Sample.of(reads[1:]), Sample.of(copies[1:])
    figures = {
        "read_GB/s": moved / GIGA / read.median,
        "copy_GB/s": moved / GIGA / copied.median,
        "of_copy": copied.median / read.median,
        "beside_a_loop_GB/s": moved / GIGA / Sample.of(busy[1:]).median,
        "loop_of_alone": Sample.of(rates[1:]).median,
    }
    return Row(SECTION, f"{count} blocks", figures, rounds, read.spread)
