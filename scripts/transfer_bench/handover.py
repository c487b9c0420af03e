"""From P's last token to D's first: what a request waits for because P and D are two engines."""

import time
from dataclasses import dataclass

from engine_ext.base.config import TransferMode
from scripts.bench.ports import free_ports
from scripts.transfer_bench.actor import Actor
from scripts.transfer_bench.engine import BenchEngine, EngineSpec
from scripts.transfer_bench.memory import Shape
from scripts.transfer_bench.report import Report, Row
from scripts.transfer_bench.sample import Sample

SECTION = "hand-over: from P's last token to D's report, without the forward passes"
MILLI = 1e3


@dataclass(frozen=True, slots=True)
class Options:
    shape: Shape
    device: str
    num_blocks: tuple[int, ...]
    requests: int
    prefill_seconds: float
    """How long P computes while D waits, in push mode."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Milliseconds. `relay`: P's answer on its way to D, which a router does in production."""

    total: float
    relay: float


def measure(report: Report, options: Options) -> None:
    modes: tuple[TransferMode, ...] = ("pull", "push")
    for mode in modes:
        with _Pair(mode, options) as pair:
            for num_blocks in options.num_blocks:
                report.say(f"hand-over: {mode}, {num_blocks} blocks")
                report.add(pair.row(num_blocks))


class _Pair:
    def __init__(self, mode: TransferMode, options: Options) -> None:
        self._mode = mode
        self._options = options
        self._port, port_d = free_ports(2)
        shape, device = options.shape, options.device
        self._p = Actor(BenchEngine, EngineSpec("bench-p", self._port, shape, device, mode))
        self._d = Actor(BenchEngine, EngineSpec("bench-d", port_d, shape, device, mode))

    def __enter__(self) -> "_Pair":
        return self

    def __exit__(self, *exception: object) -> None:
        self._d.close()
        self._p.close()

    def row(self, num_blocks: int) -> Row:
        hand_over = self._pull if self._mode == "pull" else self._push
        blocks = list(range(num_blocks))
        hand_over(f"{num_blocks}-warm", blocks)
        taken = [hand_over(f"{num_blocks}-{i}", blocks) for i in range(self._options.requests)]
        total = Sample.of([one.total for one in taken])
        figures = {"p50_ms": total.median, "p99_ms": total.percentile(99)}
        if self._mode == "pull":
            figures["between_processes_ms"] = Sample.of([one.relay for one in taken]).median
        case = f"{self._mode} {num_blocks} blocks"
        return Row(SECTION, case, figures, len(taken), total.spread)

    def _pull(self, name: str, blocks: list[int]) -> Taken:
        granted = self._p.call(BenchEngine.prefill, name, blocks)
        loaded = self._d.call(BenchEngine.load, name, granted.params, blocks)
        self._p.call(BenchEngine.drain)
        total = (loaded.loaded_at - granted.last_token_at) * MILLI
        return Taken(total, (loaded.arrived_at - granted.answered_at) * MILLI)

    def _push(self, name: str, blocks: list[int]) -> Taken:
        """D waits while P computes, as when a router starts both legs together."""
        params = {
            "do_remote_prefill": True,
            "remote_engine_id": "bench-p",
            "remote_host": "127.0.0.1",
            "remote_port": self._port,
            "remote_request_id": name,
        }
        self._d.tell(BenchEngine.load, name, params, blocks)
        time.sleep(self._options.prefill_seconds)
        granted = self._p.call(BenchEngine.prefill, name, blocks)
        loaded = self._d.collect()
        self._p.call(BenchEngine.drain)
        return Taken((loaded.loaded_at - granted.last_token_at) * MILLI, 0.0)
