"""Two thousand requests through two prefill and two decode engines, while clients leave, requests
dawdle, engines are killed and frozen, and a stranger forges messages about what they do. No answer
may be wrong, and no block may stay behind."""

import asyncio
import logging
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from engine_ext.http.counted import PREFIX
from router.commands.bench.load import drive
from tests.conftest import find_free_ports
from tests.integration.oracle import Answer, complete_all, text_of
from tests.integration.processes import Launcher, Server, metric, wait_for
from tests.soak.fleet import BEGIN_BY, LEASE, WRITE_BOUND, Fleet
from tests.soak.load import TOKENS, Load
from tests.soak.telling_engine import EAR

logger = logging.getLogger(__name__)

REQUESTS = 1000
"""In each of the two modes."""
AT_ONCE = 24
LENGTHS = (5, 20, 31, 32, 40, 64, 65, 90, 120)
PROMPTS_OF_A_LENGTH = 5
PROGRESS_SECONDS = 5.0
REST_SECONDS = 45.0
"""Longer than leases and the bounds on WRITEs of an engine that was killed."""
ROUTER_OPTIONS = ("--health-interval", "0.5", "--health-timeout", "1", "--health-failures", "1")
APART = 100
"""Requests from the beginning of one mishap to that of the next, or more: one at a time."""


class Kill(NamedTuple):
    name: str

    async def befalls(self, fleet: Fleet, rng: random.Random) -> None:
        await fleet.kill(self.name)


class Freeze(NamedTuple):
    letter: str
    shortest: float
    longest: float

    async def befalls(self, fleet: Fleet, rng: random.Random) -> None:
        await fleet.freeze(self.letter + rng.choice("12"), rng.uniform(self.shortest, self.longest))


MISHAPS = (
    Freeze("d", 0.5, 3),
    Freeze("p", LEASE + 0.5, LEASE + 3),
    Kill("d1"),
    Freeze("d", LEASE + 0.5, LEASE + 3),
    Freeze("p", 0.5, 3),
    # Not a P: one that is frozen in mid-WRITE for longer than its bound is what nothing covers.
    Freeze("d", BEGIN_BY + WRITE_BOUND + 1, BEGIN_BY + WRITE_BOUND + 3),
    Kill("p2"),
    Freeze("p", LEASE + 0.5, LEASE + 3),
    Freeze("d", 2, LEASE - 1),
    Freeze("p", 0.5, LEASE - 1),
)
AT_REST = ("leases_active", "pulls_active", "pushes_active", "quarantined_blocks_active")
TELLING = (
    "pulls_ok",
    "pulls_failed",
    "reads_unproven",
    "pushes_ok",
    "pushes_missed",
    "leases_expired",
    "notifications_unknown",
    "notifications_unsealed",
)


@pytest.fixture
def ear(monkeypatch: pytest.MonkeyPatch) -> int:
    """Where the stranger hears what the engines run."""
    (port,) = find_free_ports(1)
    monkeypatch.setenv(EAR, str(port))
    return port


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("what only these engines know\n")
    return path


@pytest.fixture
def right(alone: Server) -> dict[str, Answer]:
    prompts = [
        text_of(length, 1000 * number + length)
        for length in LENGTHS
        for number in range(PROMPTS_OF_A_LENGTH)
    ]
    answers = complete_all(alone, prompts, at_once=1, max_tokens=TOKENS)
    return dict(zip(prompts, answers, strict=True))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("mode", "has_secret"), [("pull", False), ("push", True)])
async def test_a_thousand_requests_among_engines_killed_frozen_and_lied_to_leave_no_block(
    launcher: Launcher,
    right: dict[str, Answer],
    ear: int,
    secret: Path,
    mode: str,
    has_secret: bool,
) -> None:
    """Where there is no secret the stranger's messages end leases, and loads fail; where there is
    one, they are not even read."""
    extra = {"side_channel_secret_file": str(secret)} if has_secret else {}
    with ExitStack() as stack:
        fleet = Fleet(launcher, mode, stack, extra)
        await asyncio.to_thread(fleet.start_all)
        router = None
        if mode == "pull":
            engines = fleet.named("p"), fleet.named("d")
            router = stack.enter_context(launcher.router(*engines, *ROUTER_OPTIONS))
        load = Load(fleet, right, router)
        with forging(ear, str(secret) if has_secret else "-", fleet.side_channels) as forger:
            await run(load, mode)
            num_forged = await asyncio.to_thread(asked_how_many, forger)
        logger.info("%s: %d forged messages", mode, num_forged)
        await asyncio.gather(*(asyncio.to_thread(rests, each) for each in fleet.servers.values()))
        assert load.wrong == []
        assert load.num_done == REQUESTS
        assert load.outcomes["hung"] == 0
        assert load.outcomes["the client left"] > 0
        assert load.outcomes["200"] > 0.6 * REQUESTS
        assert len(fleet.freezes) == sum(isinstance(each, Freeze) for each in MISHAPS)
        assert load.num_while_frozen > 0.1 * REQUESTS, "blocks are refilled meanwhile"
        assert num_forged > REQUESTS
        for server in fleet.servers.values():
            assert not has_secret or heard_nobody_but_engines(server)


async def run(load: Load, mode: str) -> None:
    started = time.monotonic()
    watching = asyncio.create_task(tell_progress(load, mode))
    try:
        await everything(load)
    finally:
        watching.cancel()
    logger.info("%s: %s in %.0f s", mode, load.summary, time.monotonic() - started)
    logger.info("%s: %d answers while an engine was frozen", mode, load.num_while_frozen)
    logger.info("%s: %s", mode, load.fleet.said)


async def everything(load: Load) -> None:
    """Send all requests, while engines are killed and frozen one after the other."""
    mishaps, gate = iter(MISHAPS), asyncio.Lock()
    mishap = asyncio.create_task(asyncio.sleep(0))

    async def one(client: int, number: int) -> None:
        nonlocal mishap
        async with gate:  # all wait until the last mishap is over
            if number % APART == APART // 2:
                await mishap
                mishap = asyncio.create_task(next(mishaps).befalls(load.fleet, load.rng))
        await load.one()

    try:
        await drive(range(AT_ONCE), range(REQUESTS), one)
        await mishap
    finally:
        mishap.cancel()


async def tell_progress(load: Load, mode: str) -> None:
    while True:
        await asyncio.sleep(PROGRESS_SECONDS)
        frozen = f", {load.fleet.frozen} is frozen" if load.fleet.frozen else ""
        logger.info("%s: %d of %d%s: %s", mode, load.num_done, REQUESTS, frozen, load.summary)


@contextmanager
def forging(ear: int, secret: str, ports: list[int]) -> Iterator["subprocess.Popen[str]"]:
    """The stranger in a process of his own: he may hang where an engine is frozen."""
    words = [str(ear), secret, *map(str, ports)]
    command = [sys.executable, "-m", "tests.soak.forger", *words]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def asked_how_many(forger: "subprocess.Popen[str]") -> int:
    """Return the last line of what it prints: UCX writes its errors there, too."""
    output, _ = forger.communicate("\n", timeout=30)
    assert forger.returncode == 0
    return int(output.splitlines()[-1])


def rests(server: Server) -> None:
    """Alive, with all its blocks, and nothing that it waits for."""
    wait_for(
        lambda: is_at_rest(server.metrics()),
        lambda: (
            f"{server.name} is at rest: {server.metrics()}\n{server.get('/disagg/leases').text}"
        ),
        REST_SECONDS,
        poll=0.1,
    )
    assert server.process.poll() is None
    told = {name: int(metric(server, f"{PREFIX}{name}_total")) for name in TELLING}
    logger.info("%s: %s", server.name, told)


def is_at_rest(metrics: dict[str, float]) -> bool:
    if metrics["disagg_engine_blocks_free"] < metrics["disagg_engine_blocks"]:
        return False
    return not any(metrics[PREFIX + name] for name in AT_REST)


def heard_nobody_but_engines(server: Server) -> bool:
    ignored, unknown = (
        metric(server, f"{PREFIX}notifications_{which}_total") for which in ("unsealed", "unknown")
    )
    return ignored > 0 and unknown == 0
