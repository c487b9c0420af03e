"""Two hundred streams, whose decoders are killed, told to end and frozen at random moments: each
goes on elsewhere, as often as it takes, and says what one engine says that nobody disturbed."""

import logging
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from tests.integration.oracle import Answer, complete, differences, streamed, text_of
from tests.integration.processes import BOTH_WAYS, Launcher, Server, metric, wait_for

logger = logging.getLogger(__name__)

STREAMS, AT_ONCE, DECODERS, LONG = 200, 16, 4, 500
LENGTHS = (1, 31, 32, 33, 64, 100, 200, 333, 700)
FORM = {"type": "string", "pattern": "^([a-z]{4}-[0-9]{4} ){60}$"}
# Nothing is sampled: over so many tokens the noise of batches changes a seed's draw now and then,
# in one engine alone, too.
KINDS: list[dict[str, Any]] = [
    {},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": FORM}}},
    {"stop": ["qqq", "zzzz"], "min_tokens": 40},
]
ROUTER = (
    *("--health-interval", "0.5", "--health-timeout", "1", "--prefill-timeout", "20"),
    *("--decode-policy", "round_robin", "--max-resumes", "16"),
)
FROZEN = 6.0
"""Seconds: longer than it takes to be found out."""
RESUMED = r'disagg_router_resumes_total\{.*outcome="resumed".*\}'
SEED = 200


def test_streams_that_move_at_random_moments(launcher: Launcher, alone: Server) -> None:
    asked = [(text_of(length, 900 + length), kind) for length in LENGTHS for kind in KINDS]
    right = [complete(alone, prompt, LONG, **kind) for prompt, kind in asked]
    numbers = [number % len(asked) for number in range(STREAMS)]
    with ExitStack() as stack:
        prefiller = stack.enter_context(launcher.engine("prefill", extra=BOTH_WAYS))
        decoders = Decoders(launcher, stack)
        router = stack.enter_context(launcher.router([prefiller], decoders.running, *ROUTER))
        with decoders.disturbed(random.Random(SEED)), ThreadPoolExecutor(AT_ONCE) as pool:
            answers = list(pool.map(lambda number: _stream(router, *asked[number]), numbers))
        moves = metric(router, RESUMED)
        found = differences([right[number] for number in numbers], answers)
        assert not found, "\n".join(one[:12] + one[-120:] for one in found)
        logger.info("%d streams, moved %d times: %s", STREAMS, moves, decoders.told())
        assert moves > STREAMS / 8
        for engine in (prefiller, *decoders.running):
            wait_for(partial(_is_at_rest, engine), "all blocks are back", 60)


def _stream(router: Server, prompt: str, kind: dict[str, Any]) -> Answer:
    return streamed(router, prompt, LONG, **kind)


def _is_at_rest(engine: Server) -> bool:
    names = ("requests_running", "blocks_delayed", "kv_leases_active")
    return not any(metric(engine, f"disagg_engine_{name}") for name in names)


class Decoders:
    """That keep their addresses, whatever happens to them."""

    def __init__(self, launcher: Launcher, stack: ExitStack) -> None:
        self._launcher, self._stack = launcher, stack
        ports = launcher.free_ports(2 * DECODERS)
        self._places = list(zip(ports[::2], ports[1::2], strict=True))
        self.running = [self._start(place) for place in self._places]
        self._happened: dict[str, int] = {}

    def _start(self, place: tuple[int, int]) -> Server:
        engine = self._launcher.engine(
            "decode", "--shutdown-timeout", "0", extra=BOTH_WAYS, ports=place
        )
        return self._stack.enter_context(engine)

    @contextmanager
    def disturbed(self, dice: random.Random) -> Iterator[None]:
        """One after the other, until the block ends. Raises what went wrong with that."""
        is_over = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            disturbing = pool.submit(self._disturb, dice, is_over)
            try:
                yield
            finally:
                is_over.set()
            disturbing.result(timeout=120)

    def _disturb(self, dice: random.Random, is_over: threading.Event) -> None:
        hows: list[Callable[[int, threading.Event], None]] = [self._kill, self._stop, self._freeze]
        while not is_over.wait(dice.uniform(0, 0.5)):
            busy = [number for number, one in enumerate(self.running) if _running(one) > 0]
            if busy:
                how = dice.choice(hows)
                how(dice.choice(busy), is_over)
                self._happened[how.__name__] = self._happened.get(how.__name__, 0) + 1

    def told(self) -> str:
        return ", ".join(f"{name[1:]} {count}" for name, count in sorted(self._happened.items()))

    def _kill(self, number: int, is_over: threading.Event) -> None:
        self.running[number].kill()
        self.running[number] = self._start(self._places[number])

    def _stop(self, number: int, is_over: threading.Event) -> None:
        victim = self.running[number]
        victim.process.send_signal(signal.SIGTERM)
        victim.process.wait(30)
        self.running[number] = self._start(self._places[number])

    def _freeze(self, number: int, is_over: threading.Event) -> None:
        with self.running[number].frozen():
            is_over.wait(FROZEN)


def _running(server: Server) -> float:
    return metric(server, "disagg_engine_requests_running")
