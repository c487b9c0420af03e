"""Routers whose core is full: what one request costs then decides how many a core serves.

wrk asks, for it costs its own core least: the load has to fit beside the mock engines. A run in
which the router's core was not busy says something else, and is marked so.
"""

import asyncio
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path

from scripts.bench.errors import BenchError
from scripts.router_bench.cases import Case, cases
from scripts.router_bench.load import Outcome
from scripts.router_bench.runs import Run
from scripts.router_bench.session import Contestant, Session

WRK = "wrk"
SECONDS, WARM_UP = 4, 1
BUSY = 0.9
"""Of a core; below this the router waited for others."""
ENDED = re.compile(r"(\d+) requests in ([\d.]+)(ms|s|m)\b")
TROUBLE = re.compile(r"Non-2xx[^\n]*|Socket errors: (?!connect 0, read 0, write 0)[^\n]*")
UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0}
# What a case is when nothing is waited for: connections, and the most it may cost beside the peer.
FULL = {"unary": (32, 0.4), "32k": (32, 0.5), "burst": (32, 0.15), "paced": (512, 0.75)}
SCRIPT = """\
local file = io.open("{path}", "rb")
local raw = file:read("*a")
file:close()
request = function() return raw end
"""


def saturated() -> Mapping[str, Case]:
    known = cases()
    return {
        name: replace(known[name], connections=connections, goal=goal)
        for name, (connections, goal) in FULL.items()
    }


def require_wrk() -> None:
    """Raises BenchError."""
    if shutil.which(WRK) is None:
        raise BenchError("--saturate needs wrk (apt-get install wrk)")


async def measure_full(
    session: Session, case: Case, rounds: int, seconds: float
) -> AsyncIterator[Run]:
    """Rounds in which the routers take turns. Raises BenchError."""
    with tempfile.TemporaryDirectory() as folder:
        raw, script = Path(folder) / "request", Path(folder) / "request.lua"
        raw.write_bytes(case.requests(0, 0))
        script.write_text(SCRIPT.format(path=raw))
        for _ in range(rounds):
            for contestant in session.contestants:
                if contestant.port is not None:
                    await _load(contestant, case, script, WARM_UP)
                    yield await _run(session, contestant, case, script, seconds)


async def _run(
    session: Session, contestant: Contestant, case: Case, script: Path, seconds: float
) -> Run:
    made = 0

    async def asking() -> Outcome:
        nonlocal made
        made, elapsed = await _load(contestant, case, script, seconds)
        return Outcome(elapsed)

    run = await session.watched(case, contestant, asking)
    return replace(run, requests=made)


async def _load(
    contestant: Contestant, case: Case, script: Path, seconds: float
) -> tuple[int, float]:
    """Requests, and the seconds that they took. Raises BenchError."""
    url = f"http://127.0.0.1:{contestant.port}/"
    process = await asyncio.create_subprocess_exec(
        *(WRK, "-t1", f"-c{case.connections}", f"-d{max(1, round(seconds))}s"),
        *("-s", str(script), url),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(seconds + 30):
            told, _ = await process.communicate()
    except TimeoutError as error:
        process.kill()
        raise BenchError(f"{WRK} does not end") from error
    text = told.decode(errors="replace")
    ended = ENDED.search(text)
    if process.returncode or ended is None:
        raise BenchError(f"{WRK} failed: {text}")
    if trouble := TROUBLE.search(text):
        raise BenchError(f"{contestant.name} does not answer as it should: {trouble[0]}")
    if not int(ended[1]):
        raise BenchError(f"{contestant.name} answered nothing in {ended[2]}{ended[3]}")
    return int(ended[1]), float(ended[2]) * UNITS[ended[3]]
