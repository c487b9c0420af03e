"""Checks of a router that runs, by its URL: its own pages, and a request through it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx

from router.commands.console import CommandError
from router.commands.doctor.checks import Check, Findings, check_clock, check_reach
from router.commands.doctor.fleet_checks import TEST_PROMPT_TOKENS
from router.commands.doctor.transfer_check import find_transfer
from router.commands.router_client import error_message, first_model_in, send
from router.commands.status import NotMetricsError, RouterStatus, parse_metrics
from router.fleet.engine import Engine
from router.fleet.pair_rates import SLOW_CURE, rate_text
from router.openai.answers import parse_object
from router.proxy.warmup import PROMPT_TOKEN_IDS
from router.settings import Address, Settings, SettingsError, load

MAX_LISTED = 8


@dataclass(slots=True)
class RouterChecker:
    """Checks the router at `url`. `headers` have the client's key, if there is one."""

    url: str
    address: Address
    headers: Mapping[str, str]
    found: Findings = field(default_factory=lambda: Findings("router"))
    status: RouterStatus | None = None
    """The router's status, from its metrics."""
    is_router: bool = False

    async def run(self) -> list[Check]:
        """Check all but a request."""
        self.found = Findings("router")
        await self._run()
        return self.found.checks

    async def _run(self) -> None:
        if not await check_reach(self.found, self.url, self.address, "the router's URL"):
            return
        try:
            sent = time.time()
            answer = await self._get("/health")
            headers = [(k.lower().encode(), v.encode()) for k, v in answer.headers.items()]
            check_clock(self.found, headers, sent, time.time())
            if answer.status_code != 200 or "status" not in (parse_object(answer.content) or {}):
                text = f"/health answers {answer.status_code}"
                self.found.fail("health", text, "is this a disagg-router?")
                return
            self.found.ok("health", "/health answers 200")
            self.is_router = True
            self._check_ready(await self._get("/ready"))
            await self._read_metrics()
        except CommandError as error:
            self.found.fail("answers", str(error), "look at the router's log")

    async def _get(self, path: str) -> httpx.Response:
        return await send("GET", f"{self.url}{path}", self.headers)

    def _check_ready(self, answer: httpx.Response) -> None:
        content = parse_object(answer.content) or {}
        status, reasons = content.get("status"), _pairs(content.get("reasons"))
        text = "; ".join(f"{name}: {why}" for name, why in reasons[:MAX_LISTED]) or "no reason"
        if answer.status_code == 200 and status == "ready":
            self.found.ok("ready", "requests are answered")
        elif answer.status_code == 200 and status == "degraded":
            cure = "start Redis, or correct its URL" if "Redis" in text else "see the lines below"
            self.found.fail("ready", f"degraded: {text}", cure)
        else:
            self.found.fail("ready", f"requests are not answered: {text}", "see the lines below")
        for name, problem in _pairs(content.get("sources"))[:MAX_LISTED]:
            self.found.fail("discovery", f"{name}: {problem}", "see docs/discovery.md")
        findings = content.get("findings")
        for finding in findings[:MAX_LISTED] if isinstance(findings, list) else ():
            if isinstance(finding, dict):
                self.found.fail("fleet", _line(finding.get("text")), _line(finding.get("cure")))

    async def _read_metrics(self) -> None:
        answer = await self._get("/metrics")
        try:
            if answer.status_code == 200:
                self.status = parse_metrics(answer.content.decode("utf-8", "replace"))
        except NotMetricsError:
            pass
        if self.status is None:
            text = f"/metrics answers {answer.status_code}, so its engines are not known"
            self.found.skip("engines", f"{text}: name them with --prefill and --decode")
            return
        self._check_kv(self.status)
        for engine in self.status.engines:
            name = f"{engine.role} {engine.name}"
            if engine.health == "healthy":
                self.found.ok("engine", f"{name} is healthy")
            else:
                cure = "see the lines below, or the router's log"
                self.found.fail("engine", f"{name} is {engine.health}", cure)

    def _check_kv(self, status: RouterStatus) -> None:
        """Report the pairs that the router avoids, the first tokens that it has compared, and slow
        pairs."""
        for pair in status.avoided_pairs:
            text = f"{pair.prefiller} -> {pair.decoder} is avoided: no KV exchanged, or wrong KV"
            self.found.fail("KV pair", text, "look at the router's log for the reason")
        agreed, disagreed = (status.canary.get(name, 0) for name in ("agreed", "disagreed"))
        if disagreed:
            text = f"{disagreed} of {agreed + disagreed} compared first tokens were of wrong KV"
            cure = "look at the router's log for the pairs, and at docs/failures.md#wrong-kv"
            self.found.fail("KV canary", text, cure)
        elif agreed:
            self.found.ok("KV canary", f"{agreed} compared first tokens agree")
        slow = [one for one in status.pairs if one.slowness]
        for one in slow[:MAX_LISTED]:
            self.found.fail("KV rate", one.describe(), SLOW_CURE)
        if status.pairs and not slow:
            slowest = rate_text(status.pairs[0].bytes_per_second)
            self.found.ok("KV rate", f"{slowest} or more, of {len(status.pairs)} pairs")

    @property
    def reached(self) -> frozenset[str]:
        """The engines that the router finds healthy."""
        engines = () if self.status is None else self.status.engines
        return frozenset(one.name for one in engines if one.health == "healthy")

    def settings(self) -> Settings | None:
        """Return settings with the router's engines; None if they are not known."""
        engines = () if self.status is None else self.status.engines
        urls: dict[str, list[str]] = {"prefill": [], "decode": []}
        for engine in engines:
            for role, listed in urls.items():
                if engine.role in (role, "both"):
                    listed.append(f"http://{engine.name}")
        try:
            return load({role: tuple(listed) for role, listed in urls.items()})
        except SettingsError:
            return None

    async def check_request(self, engines: Sequence[Engine], timeout_s: float) -> list[Check]:
        """Send a request through the router, and ask the engines whether KV moved."""
        found = Findings("router")
        await self._check_request(found, engines, timeout_s)
        return found.checks

    async def _check_request(
        self, found: Findings, engines: Sequence[Engine], timeout_s: float
    ) -> None:
        name = f"doctor-{Random().getrandbits(64):016x}"
        try:
            listed = parse_object((await self._get("/v1/models")).content)
            model = first_model_in(listed).get("id")
            body = {
                **({"model": model} if isinstance(model, str) else {}),
                "prompt": Random().choices(PROMPT_TOKEN_IDS, k=TEST_PROMPT_TOKENS),
                # One token would be the answer of a prefill engine alone.
                "max_tokens": 2,
                "ignore_eos": True,
                # Or a decode engine might answer alone (--target-itl, --decode-first-threshold).
                "cache_hit_threshold": 0,
            }
            answer = await send(
                "POST",
                f"{self.url}/v1/completions",
                {**self.headers, "x-request-id": name, "content-type": "application/json"},
                json.dumps(body).encode(),
                timeout_s,
            )
        except CommandError as error:
            found.fail("request", str(error), "look at the router's log, or set --timeout")
            return
        if answer.status_code != 200:
            text = error_message(parse_object(answer.content) or {})
            cure = "look at the router's log"
            if answer.status_code == 401:
                cure = "set OPENAI_API_KEY to a key of the router"
            found.fail("request", f"status {answer.status_code}: {text}", cure)
            return
        found.ok("request", "answered")
        if len(engines) == 1:
            found.skip("KV moved", "no: there is one engine")
            return
        moved, tells = await find_transfer(engines, name)
        if moved is not None:
            found.ok("KV moved", f"yes, {moved.blocks} blocks")
        elif tells:
            cure = "see the lines above, and the router's access log for this request"
            found.fail("KV moved", f"no: one engine computed request {name}", cure)
        else:
            text = "not known: no engine that reports transfers can be reached from here"
            found.skip("KV moved", text)


def _pairs(content: Any) -> list[tuple[str, str]]:
    items = content.items() if isinstance(content, dict) else ()
    return [(_line(name), _line(why)) for name, why in items]


def _line(value: object) -> str:
    return " ".join(str(value or "").split())[:300]
