"""Conversations whose legs name last turns, holders of their prefix, both, or neither."""

import asyncio
import json
import logging
import random
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from router.commands.bench.load import TIMEOUT, LoadExchange, drive
from tests.integration.legs import coordinates_in, decode_body, prefill_body
from tests.integration.oracle import Answer, complete, differences, tokens_of
from tests.integration.processes import Server
from tests.soak.fleet import Fleet
from tests.soak.load import MAX_WAIT_S, post

logger = logging.getLogger(__name__)

AT_ONCE = 12
SYSTEMS = [tokens_of(256, number) for number in range(6)]
MAX_TURNS = 4
TRIES = 8
"""The number of attempts per turn, since its engines may be killed, restarted or frozen."""
TOKENS = 6
KINDS = ("", "turn", "holders", "turn holders")


class Mishap(Protocol):
    async def befalls(self, fleet: Fleet, rng: random.Random) -> None: ...


class Conversations:
    """Clients that send both legs themselves, and compare each answer with one engine's alone."""

    def __init__(self, fleet: Fleet, alone: Server, mode: str) -> None:
        self.fleet = fleet
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._alone = alone
        self._mode = mode
        # After a restart these name an engine that is gone, as a router's memory may.
        self._holders = {
            name: coordinates_in(server.get("/disagg/identity").json()["ranks"][0])
            for name, server in fleet.servers.items()
        }

    async def run(self, count: int, mishaps: Sequence[Mishap]) -> None:
        """Hold `count` conversations, while one mishap follows the other."""
        rng, coming, apart = random.Random(5), iter(mishaps), count // len(mishaps)
        mishap = asyncio.create_task(asyncio.sleep(0))

        async def one(client: int, number: int) -> None:
            nonlocal mishap
            if number % apart == apart // 2 and mishap.done():
                mishap = asyncio.create_task(next(coming).befalls(self.fleet, rng))
            await self.talk(number)
            if number % 50 == 0:
                logger.info("%s, %d: %s", self._mode, number, self.outcomes)

        await drive(range(AT_ONCE), range(count), one)
        await mishap

    def check(self) -> None:
        logger.info("%s: %s", self._mode, self.outcomes)
        assert self.wrong == []
        assert not [kind for kind in self.outcomes if "hung" in kind]
        assert all(self.outcomes[f"{kind}: 200"] for kind in KINDS)

    async def talk(self, number: int) -> None:
        rng = random.Random(number)
        prompt = [*rng.choice(SYSTEMS), *tokens_of(rng.randint(1, 80), 9000 + number)]
        last: dict[str, Any] | None = None
        for turn in range(rng.randint(1, MAX_TURNS)):
            answer, last = await self._turn(prompt, last, rng)
            right = await asyncio.to_thread(complete, self._alone, prompt, TOKENS)
            self.wrong += [f"{number}.{turn}: {one}" for one in differences([right], [answer])]
            prompt = [*prompt, *answer.tokens, *tokens_of(rng.randint(1, 60), 17 * number + turn)]
            if rng.random() < 0.3:  # an edited history
                at = rng.randrange(len(prompt))
                prompt[at] = (prompt[at] + 1) % 256 or 1

    async def _turn(
        self, prompt: list[int], last: dict[str, Any] | None, rng: random.Random
    ) -> tuple[Answer, dict[str, Any] | None]:
        """Retried without the last turn, as a router would."""
        for _ in range(TRIES):
            exchange, kind = await self._both_legs(prompt, last, rng)
            if exchange.problem == TIMEOUT:
                self.outcomes[f"{kind}: hung"] += 1
            elif exchange.status == 200 and not exchange.problem:
                self.outcomes[f"{kind}: 200"] += 1
                said = json.loads(exchange.body)
                return Answer.in_body(said), said.get("kv_transfer_params")
            else:
                self.outcomes[f"{exchange.status} {exchange.problem}"] += 1
            last = None
            await asyncio.sleep(rng.uniform(0.1, 1))
        raise AssertionError(f"no answer in {TRIES} tries: {exchange}")

    async def _both_legs(
        self, prompt: list[int], last: dict[str, Any] | None, rng: random.Random
    ) -> tuple[LoadExchange, str]:
        p_name, d_name = self.fleet.pick("p", rng), self.fleet.pick("d", rng)
        given = dict(last or {})
        if rng.random() < 0.5:
            known = rng.sample(sorted(self._holders), 2)
            given["holders"] = [{**self._holders[one], "expected_tokens": 256} for one in known]
        kind = " ".join([*(["turn"] if last else []), *(["holders"] if "holders" in given else [])])
        p_body = prefill_body(prompt, given)
        if self._mode == "pull":
            exchange = await self._leg(p_name, p_body)
            if exchange.status != 200 or exchange.problem:
                return exchange, kind
            params = {**json.loads(exchange.body)["kv_transfer_params"], "retain": True}
            return await self._leg(d_name, decode_body(prompt, params, TOKENS)), kind
        name = uuid.uuid4().hex
        p_body["kv_transfer_params"]["transfer_id"] = name
        named = {"do_remote_prefill": True, "remote_request_id": name, "transfer_id": name}
        params = {**named, "retain": True, **self.fleet.coordinates[p_name]}
        decoding = asyncio.create_task(self._leg(d_name, decode_body(prompt, params, TOKENS), name))
        try:
            exchange = await self._leg(p_name, p_body, name)
            is_good = exchange.status == 200 and not exchange.problem
            return (await decoding if is_good else exchange), kind
        finally:
            decoding.cancel()
            await asyncio.gather(decoding, return_exceptions=True)

    async def _leg(self, name: str, body: dict[str, Any], request_id: str = "") -> LoadExchange:
        headers = [("x-request-id", request_id)] if request_id else []
        return await post(self.fleet.servers[name], body, *headers, timeout=MAX_WAIT_S)
