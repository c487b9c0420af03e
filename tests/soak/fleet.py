"""Two prefill and two decode engines that are killed, started again, and frozen."""

import asyncio
import os
import random
from contextlib import ExitStack
from typing import Any

from tests.conftest import find_free_ports
from tests.integration.legs import coordinates_in, prefill
from tests.integration.processes import CONNECTORS, REFERENCE, Launcher, Server
from tests.soak.telling_engine import EAR

NUM_BLOCKS = 36
"""Few, so that what is freed is soon refilled."""
NOTICED_AFTER = 1.0
"""Seconds after which a frozen engine is asked no more, as the router's probes notice it."""
LEASE = 6
WRITE_BOUND = 12
BEGIN_BY = 3
"""Three heartbeats: for so long after it was last asked an engine may begin a WRITE."""
EXTRA = {
    "kv_lease_duration": LEASE,
    "push_registration_timeout": 10,
    "push_write_bound": WRITE_BOUND,
}
CACHING = {"p2"}
"""Those with a prefix cache; the others move or compute all."""


class Fleet:
    """Engines by name, restarted on their addresses."""

    def __init__(
        self,
        launcher: Launcher,
        mode: str,
        stack: ExitStack,
        extra: dict[str, Any],
        options: tuple[str, ...] | None = None,
    ) -> None:
        """`options` of all engines, instead of those that differ by name."""
        self._launcher = launcher
        self._mode = mode
        self._stack = stack
        self._extra = {**EXTRA, **extra}
        self._options = options
        self._ports: dict[str, tuple[int, int]] = {}
        self._shunned: set[str] = set()
        self.frozen: str | None = None
        self.freezes: list[tuple[str, float]] = []
        """Whom, and for how many seconds."""
        self.servers: dict[str, Server] = {}
        self.coordinates: dict[str, dict[str, Any]] = {}
        for name in ("p1", "p2", "d1", "d2"):
            http, side_channel = find_free_ports(2)
            self._ports[name] = (http, side_channel)

    @property
    def side_channels(self) -> list[int]:
        return [side_channel for _, side_channel in self._ports.values()]

    def start_all(self) -> None:
        for name in self._ports:
            self._start(name)

    def _start(self, name: str) -> None:
        """One decode engine ends a failed load with an error, the other computes."""
        caching = () if name in CACHING else ("--no-enable-prefix-caching",)
        usual = ("--num-blocks", str(NUM_BLOCKS), *caching)
        server = self._stack.enter_context(
            self._launcher.engine(
                name,
                *(usual if self._options is None else self._options),
                module=REFERENCE if EAR not in os.environ else "tests.soak.telling_engine",
                connector=CONNECTORS[self._mode],
                extra=self._extra,
                policy="recompute" if name == "d2" else "fail",
                ports=self._ports[name],
            )
        )
        self.servers[name] = server
        if name[0] == "p":
            answer = prefill(server, "hello")
            self.coordinates[name] = coordinates_in(answer)

    async def kill(self, name: str) -> None:
        """And start it again."""
        self._shunned.add(name)
        await asyncio.to_thread(self.servers[name].kill)
        await asyncio.to_thread(self._start, name)
        self._shunned.discard(name)

    async def freeze(self, name: str, seconds: float) -> None:
        with self.servers[name].frozen():
            self.frozen = name
            self.freezes.append((name, seconds))
            await asyncio.sleep(min(seconds, NOTICED_AFTER))
            self._shunned.add(name)
            await asyncio.sleep(max(0.0, seconds - NOTICED_AFTER))
        self.frozen = None
        self._shunned.discard(name)

    @property
    def said(self) -> str:
        froze = ", ".join(f"{name} for {seconds:.1f} s" for name, seconds in self.freezes)
        return f"{len(self.freezes)} times frozen: {froze}"

    def pick(self, letter: str, rng: random.Random) -> str:
        """One that is not known to be dead or frozen, as a router would."""
        return rng.choice(
            [name for name in self.servers if name[0] == letter and name not in self._shunned]
        )

    def named(self, letter: str) -> list[Server]:
        return [server for name, server in self.servers.items() if name[0] == letter]
