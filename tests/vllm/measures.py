"""What vLLM and the connector in it count, and the prompts that tests send."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from engine_ext.common.histogram import Bucket
from tests.integration.legs import take_turn
from tests.integration.oracle import Prompt, complete, differences, tokens_of
from tests.integration.processes import Server, cpu_seconds, family, metric, pause, wait_for

COMPUTED = r'vllm:prompt_tokens_by_source_total\{.*source="local_compute"\}'
FETCHED = r'vllm:prompt_tokens_by_source_total\{.*source="external_kv_transfer"\}'
RUNNING = r"vllm:num_requests_running\{.*"
WAITING = r"vllm:num_requests_waiting\{.*"
USED = r"vllm:kv_cache_usage_perc\{.*"

SHORT = (1, 2, 31, 32, 33, 63, 64, 65, 90, 100)
LONG = (200, 255, 256, 257, 300, 500, 700, 900, 1200, 1500)


def prompts() -> list[Prompt]:
    return [tokens_of(length, 1000 + length) for length in SHORT + LONG]


def freed(server: Server) -> bool:
    return metric(server, USED) == 0


@contextmanager
def nothing_left(*servers: Server, seconds: float = 20) -> Iterator[None]:
    """What the block asks for leaves no KV block behind; what was held before may stay."""
    before = {server: metric(server, USED) for server in servers}
    yield
    for server, used in before.items():
        what = f"{server.name} has its blocks back"
        wait_for(partial(_uses_at_most, server, used), what, seconds)


def _uses_at_most(server: Server, used: float) -> bool:
    return metric(server, USED) <= used


def share_of_a_core(server: Server) -> float:
    """Of an engine that waits for another. One window, between two of the looks that it takes a
    minute after it last heard anything: each makes vLLM's workers spin for a second, as every step
    does."""
    pause(3, "the workers' spin after the step is over")
    processes = family(server.process.pid)
    before, started = cpu_seconds(processes), time.monotonic()
    pause(15, "it waits")
    return (cpu_seconds(processes) - before) / (time.monotonic() - started)


def counted(server: Server, name: str) -> float:
    """A counter or a gauge of the connector's."""
    return metric(server, rf"disagg_engine_kv_{name}(_total)?\{{.*")


def distributed(server: Server, name: str) -> Bucket:
    """A histogram as one bucket: how many values, and their sum."""
    times, total = (metric(server, rf"{name}_{part}\{{.*") for part in ("count", "sum"))
    return Bucket(int(times), total)


def prefills_only_what_is_new(
    prefiller: Server, decoder: Server, alone: Server, prompt: list[int], seed: int
) -> int:
    """Take two turns, the second of which is that of `alone`, and computed at P only as far as D
    does not hold it. Return how many tokens D holds."""
    turn = take_turn(prefiller, decoder, prompt)
    assert turn.params is not None
    held: int = turn.params["remote_num_tokens"]
    longer = [*prompt, *turn.answer.tokens, *tokens_of(50, seed)]
    right, before = complete(alone, longer), metric(prefiller, COMPUTED)
    again = take_turn(prefiller, decoder, longer, turn.params)
    assert differences([right], [again.answer]) == []
    assert metric(prefiller, COMPUTED) - before == len(longer) - held
    return held
