"""Clients: some leave at once, some after a while, most wait for their answer and judge it."""

import asyncio
import json
import random
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from router.commands.bench.load import REFUSED, TIMEOUT, Client, LoadExchange, request_bytes
from tests.integration.legs import decode_body, prefill_body
from tests.integration.oracle import Answer, differences
from tests.integration.processes import Server
from tests.soak.fleet import Fleet

TOKENS = 4
MAX_WAIT_S = 60.0
"""Longer than anything may take that a client waits for, frozen engines included."""
HASTY_WAIT_S = (0.0, 0.3)
RESTLESS_WAIT_S = (2.0, 8.0)
HASTY_SHARE = RESTLESS_SHARE = 0.1
MAX_LEG_DELAY_S = 0.05
"""Seconds by which the legs of a push are apart, at most."""


@dataclass
class Load:
    fleet: Fleet
    right: dict[str, Answer]
    router: Server | None
    """None: the load sends both legs itself, at once."""
    rng: random.Random = field(default_factory=lambda: random.Random(3))
    outcomes: "Counter[str]" = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    num_while_frozen: int = 0
    """Answers that came while an engine stood still."""

    @property
    def num_done(self) -> int:
        return sum(self.outcomes.values())

    @property
    def summary(self) -> str:
        return ", ".join(f"{number} x {what}" for what, number in self.outcomes.most_common())

    async def one(self) -> None:
        """Send one request, wait as long as its client would, and count what came of it."""
        prompt = self.rng.choice(list(self.right))
        wait = self._wait()
        try:
            async with asyncio.timeout(wait):
                exchange = await self._ask(prompt)
        except TimeoutError:
            self.outcomes["the client left" if wait < MAX_WAIT_S else "hung"] += 1
            return
        assert exchange.problem != TIMEOUT
        if exchange.problem:
            refused = exchange.problem == REFUSED or not exchange.status
            self.outcomes["no connection" if refused else exchange.problem] += 1
            return
        self.outcomes[str(exchange.status)] += 1
        if exchange.status == 200:
            answer = Answer.in_body(json.loads(exchange.body))
            self.wrong += differences([self.right[prompt]], [answer])
            self.num_while_frozen += self.fleet.frozen is not None

    def _wait(self) -> float:
        kind = self.rng.random()
        if kind < HASTY_SHARE:
            return self.rng.uniform(*HASTY_WAIT_S)
        if kind < HASTY_SHARE + RESTLESS_SHARE:
            return self.rng.uniform(*RESTLESS_WAIT_S)
        return MAX_WAIT_S

    async def _ask(self, prompt: str) -> LoadExchange:
        if self.router is None:
            return await self._push(prompt)
        body = decode_body(prompt, {}, TOKENS)
        del body["kv_transfer_params"]
        return await post(self.router, body)

    async def _push(self, prompt: str) -> LoadExchange:
        """Send both legs at once; one that fails takes the other with it, as a router would."""
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
        d_body = decode_body(prompt, params, TOKENS)
        decoding = asyncio.create_task(self._leg(d_name, d_body, name))
        prefilling = asyncio.create_task(self._leg(p_name, p_body, name))
        try:
            exchange = await prefilling
            is_good = exchange.status == 200 and not exchange.problem
            return await decoding if is_good else exchange
        finally:
            decoding.cancel()
            prefilling.cancel()
            await asyncio.gather(decoding, prefilling, return_exceptions=True)

    async def _leg(self, name: str, body: dict[str, Any], request_id: str) -> LoadExchange:
        await asyncio.sleep(self.rng.uniform(0, MAX_LEG_DELAY_S))
        return await post(self.fleet.servers[name], body, ("x-request-id", request_id))


async def post(
    server: Server,
    body: dict[str, Any],
    *headers: tuple[str, str],
    timeout: float = 2 * MAX_WAIT_S,
) -> LoadExchange:
    client = Client("127.0.0.1", server.port)
    request = request_bytes("/v1/completions", json.dumps(body).encode(), headers)
    try:
        return await client.send(request, timeout)
    finally:
        client.close()
