"""Two thousand requests through two prefill and two decode engines, while clients leave, requests
dawdle and engines are killed. No answer may be wrong, and no block may stay behind."""

import asyncio
import logging
import random
import time
import uuid
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.conftest import find_free_ports
from tests.integration.legs import coordinates_in, decode_body, prefill, prefill_body
from tests.integration.oracle import complete_all, text_of
from tests.integration.processes import CONNECTORS, Launcher, Server, metric, wait_for

logger = logging.getLogger(__name__)

REQUESTS = 1000
"""In each of the two modes."""
AT_ONCE = 16
TOKENS = 4
KILLS = {250: "d1", 550: "p2"}
"""Which engine is killed, and started again, before which request."""
EXTRA = {"kv_lease_duration": 6, "push_registration_timeout": 10}


class Fleet:
    """Engines by name, restarted on their addresses."""

    def __init__(
        self,
        launcher: Launcher,
        mode: str,
        stack: ExitStack,
    ) -> None:
        self._launcher = launcher
        self._mode = mode
        self._stack = stack
        self._ports: dict[str, tuple[int, int]] = {}
        self._down: set[str] = set()
        self.servers: dict[str, Server] = {}
        self.coordinates: dict[str, dict[str, Any]] = {}
        for name in ("p1", "p2", "d1", "d2"):
            http, side_channel = find_free_ports(2)
            self._ports[name] = (http, side_channel)
            self.start(name)

    def start(self, name: str) -> None:
        """One decode engine ends a failed load with an error, the other computes."""
        server = self._stack.enter_context(
            self._launcher.engine(
                name,
                *(["--no-enable-prefix-caching"] if name[0] == "d" else []),
                connector=CONNECTORS[self._mode],
                extra=EXTRA,
                policy="recompute" if name == "d2" else "fail",
                ports=self._ports[name],
            )
        )
        self.servers[name] = server
        if name[0] == "p":
            answer = prefill(server, "hello")
            self.coordinates[name] = coordinates_in(answer)

    def restart(self, name: str) -> None:
        self._down.add(name)
        self.servers[name].kill()
        self.start(name)
        self._down.discard(name)

    def pick(self, letter: str, rng: random.Random) -> str:
        """One that is not known to be dead, as a router would."""
        return rng.choice(
            [name for name in self.servers if name[0] == letter and name not in self._down]
        )

    def named(self, letter: str) -> list[Server]:
        return [server for name, server in self.servers.items() if name[0] == letter]


@dataclass
class Soak:
    client: httpx.AsyncClient
    fleet: Fleet
    right: dict[str, tuple[int, ...]]
    router: Server | None
    rng: random.Random = field(default_factory=lambda: random.Random(3))
    outcomes: "Counter[str]" = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    @property
    def num_done(self) -> int:
        return sum(self.outcomes.values())

    async def run(self) -> None:
        places = asyncio.Semaphore(AT_ONCE)
        async with asyncio.TaskGroup() as group:
            for number in range(REQUESTS):
                if number in KILLS:
                    group.create_task(asyncio.to_thread(self.fleet.restart, KILLS[number]))
                await places.acquire()
                task = group.create_task(self.one())
                task.add_done_callback(lambda _: places.release())

    async def one(self) -> None:
        prompt = self.rng.choice(list(self.right))
        patience = self.rng.random() * 0.3 if self.rng.random() < 0.1 else 60
        try:
            async with asyncio.timeout(patience):
                self.judge(prompt, await self.ask(prompt))
        except TimeoutError:
            self.outcomes["the client left" if patience < 1 else "hung"] += 1
        except httpx.TransportError:
            self.outcomes["no connection"] += 1

    def judge(self, prompt: str, response: httpx.Response) -> None:
        if response.status_code == 200:
            tokens = tuple(response.json()["choices"][0]["token_ids"])
            if tokens != self.right[prompt]:
                self.wrong.append(f"{prompt!r}: {tokens}, not {self.right[prompt]}")
        self.outcomes[str(response.status_code)] += 1

    async def ask(self, prompt: str) -> httpx.Response:
        if self.router is not None:
            body = decode_body(prompt, {}, TOKENS)
            del body["kv_transfer_params"]
            return await self.client.post(f"{self.router.url}/v1/completions", json=body)
        return await self.push(prompt)

    async def push(self, prompt: str) -> httpx.Response:
        """Both legs at once; one that fails takes the other with it, as a router would."""
        name = uuid.uuid4().hex
        p_name, d_name = self.fleet.pick("p", self.rng), self.fleet.pick("d", self.rng)
        p_body = prefill_body(prompt)
        p_body["kv_transfer_params"]["transfer_id"] = name
        params = {
            "do_remote_prefill": True,
            "remote_request_id": name,
            "transfer_id": name,
            **self.fleet.coordinates[p_name],
        }
        decoding = asyncio.create_task(
            self.leg(d_name, decode_body(prompt, params, TOKENS), name, self.rng.random() * 0.05)
        )
        prefilling = asyncio.create_task(self.leg(p_name, p_body, name, self.rng.random() * 0.05))
        try:
            answer = await prefilling
            return await decoding if answer.status_code == 200 else answer
        finally:
            decoding.cancel()
            prefilling.cancel()
            await asyncio.gather(decoding, prefilling, return_exceptions=True)

    async def leg(
        self, name: str, body: dict[str, Any], request_id: str, delay: float
    ) -> httpx.Response:
        await asyncio.sleep(delay)
        url = f"{self.fleet.servers[name].url}/v1/completions"
        return await self.client.post(url, json=body, headers={"x-request-id": request_id})


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_a_thousand_requests_with_aborts_delays_and_kills_leave_no_block(
    launcher: Launcher, alone: Server, mode: str
) -> None:
    prompts = [text_of(length, 700 + length) for length in (5, 20, 31, 32, 40, 64, 65, 90, 120)]
    answers = await asyncio.to_thread(complete_all, alone, prompts, 4, max_tokens=TOKENS)
    right = {prompt: answer.tokens for prompt, answer in zip(prompts, answers, strict=True)}
    with ExitStack() as stack:
        fleet = await asyncio.to_thread(Fleet, launcher, mode, stack)
        router = None
        if mode == "pull":
            router = stack.enter_context(launcher.router(fleet.named("p"), fleet.named("d")))
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=64)) as client:
            soak = Soak(client, fleet, right, router)
            started = time.monotonic()
            await soak.run()
            logger.info("%s: %s in %.0f s", mode, soak.outcomes, time.monotonic() - started)
        assert soak.wrong == []
        assert soak.num_done == REQUESTS
        assert soak.outcomes["hung"] == 0
        assert soak.outcomes["the client left"] > 0
        assert soak.outcomes["200"] > 0.6 * REQUESTS
        for server in fleet.servers.values():
            await asyncio.to_thread(every_block_is_free, server)


def every_block_is_free(server: Server) -> None:
    total = metric(server, "disagg_engine_blocks")
    free = "disagg_engine_blocks_free"
    wait_for(lambda: metric(server, free) == total, f"{server.name} has its blocks back", 40)
    assert metric(server, "disagg_engine_kv_leases_active") == 0
    assert metric(server, "disagg_engine_kv_pushes_active") == 0
    assert metric(server, "disagg_engine_kv_pulls_active") == 0
