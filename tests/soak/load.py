"""Clients: some leave at once, some after a while, most wait for their answer and judge it."""

import asyncio
import random
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.integration.legs import decode_body, prefill_body
from tests.integration.oracle import Answer, differences
from tests.integration.processes import Server
from tests.soak.fleet import Fleet

TOKENS = 4
PATIENCE = 60.0
"""Longer than anything may take that a client waits for, frozen engines included."""
HASTE = (0.0, 0.3)
RESTLESSNESS = (2.0, 8.0)
HASTY_SHARE = RESTLESS_SHARE = 0.1
DAWDLING = 0.05
"""Seconds by which the legs of a push are apart, at most."""


@dataclass
class Load:
    client: httpx.AsyncClient
    fleet: Fleet
    right: dict[str, Answer]
    router: Server | None
    """None: both legs are sent by hand, at once."""
    rng: random.Random = field(default_factory=lambda: random.Random(3))
    outcomes: "Counter[str]" = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    num_while_frozen: int = 0
    """Answers that came while an engine stood still."""

    @property
    def num_done(self) -> int:
        return sum(self.outcomes.values())

    @property
    def said(self) -> str:
        """What came of how many requests."""
        return ", ".join(f"{number} x {what}" for what, number in self.outcomes.most_common())

    async def one(self) -> None:
        prompt = self.rng.choice(list(self.right))
        patience = self._patience()
        try:
            async with asyncio.timeout(patience):
                self._judge(prompt, await self._ask(prompt))
        except TimeoutError:
            self.outcomes["the client left" if patience < PATIENCE else "hung"] += 1
        except httpx.TransportError:
            self.outcomes["no connection"] += 1

    def _patience(self) -> float:
        kind = self.rng.random()
        if kind < HASTY_SHARE:
            return self.rng.uniform(*HASTE)
        if kind < HASTY_SHARE + RESTLESS_SHARE:
            return self.rng.uniform(*RESTLESSNESS)
        return PATIENCE

    def _judge(self, prompt: str, response: httpx.Response) -> None:
        self.outcomes[str(response.status_code)] += 1
        if response.status_code == 200:
            answer = Answer.in_body(response.json())
            self.wrong += differences([self.right[prompt]], [answer])
            self.num_while_frozen += self.fleet.frozen is not None

    async def _ask(self, prompt: str) -> httpx.Response:
        if self.router is not None:
            body = decode_body(prompt, {}, TOKENS)
            del body["kv_transfer_params"]
            return await self.client.post(f"{self.router.url}/v1/completions", json=body)
        return await self._push(prompt)

    async def _push(self, prompt: str) -> httpx.Response:
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
        d_body = decode_body(prompt, params, TOKENS)
        decoding = asyncio.create_task(self._leg(d_name, d_body, name))
        prefilling = asyncio.create_task(self._leg(p_name, p_body, name))
        try:
            answer = await prefilling
            return await decoding if answer.status_code == 200 else answer
        finally:
            decoding.cancel()
            prefilling.cancel()
            await asyncio.gather(decoding, prefilling, return_exceptions=True)

    async def _leg(self, name: str, body: dict[str, Any], request_id: str) -> httpx.Response:
        await asyncio.sleep(self.rng.uniform(0, DAWDLING))
        url = f"{self.fleet.servers[name].url}/v1/completions"
        return await self.client.post(url, json=body, headers={"x-request-id": request_id})
