"""The result of a check, and the checks of one engine, one after another.

The engine is reached as the router would reach it: by its pool, with TLS and the engines' key.
"""

from __future__ import annotations

import asyncio
import email.utils
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from time import monotonic as now
from typing import TypeVar

from router.commands.connection_errors import no_answer, reason_of
from router.commands.router_client import error_message
from router.common.daemon_thread import call_in_daemon_thread
from router.fleet.engine import PREFILL, Engine
from router.fleet.engine_probe import HEALTH_PATH, MAX_ANSWER_BYTES
from router.fleet.fleet import Fleet
from router.fleet.kv_facts import IDENTITY_PATH
from router.fleet.kv_protocol import MOONCAKE, NIXL, SGLANG
from router.fleet.probes import Prober, json_of, model_facts_in, models_in
from router.http_client.errors import (
    CompressedAnswerError,
    ConnectError,
    TlsError,
    UpstreamError,
)
from router.http_client.pool import CompleteAnswer
from router.openai.answers import parse_object
from router.settings import Address, is_loopback

# The longest wait for one answer.
CHECK_TIMEOUT_S = 5.0
# Clocks that differ by more than this are reported; a Date header has whole seconds.
MAX_SKEW_S = 5.0
MAX_SHOWN = 3
# A check that fails is repeated, since a busy fleet may fail once: so often, after this pause, and
# not for longer than this.
MAX_TRIES = 3
RETRY_PAUSE_S = 1.0
RETRY_FOR_S = 25.0
# The checks that depend on where the doctor runs, and on what it may ask.
NO_REQUESTS = ", so it gets no requests beside engines that list their models"
REACH = ("name", "port", "answers", "health", "models")
# KV that is wrong once in a while is wrong: a failure of this check is not repeated.
KV_CONTENT = "KV content"
T = TypeVar("T")


class State(StrEnum):
    OK = "OK"
    FAIL = "FAIL"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. `subject` is what was checked: an engine, a pair, a file."""

    subject: str
    name: str
    state: State
    text: str = ""
    cure: str = ""


class Findings:
    """Collects the checks of one subject."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.checks: list[Check] = []

    def ok(self, name: str, text: str) -> None:
        self._add(name, State.OK, text)

    def skip(self, name: str, text: str) -> None:
        self._add(name, State.SKIPPED, text)

    def fail(self, name: str, text: str, cure: str) -> None:
        self._add(name, State.FAIL, text, cure)

    def _add(self, name: str, state: State, text: str, cure: str = "") -> None:
        self.checks.append(Check(self.subject, name, state, text, cure))


def is_repeated(results: Sequence[Check]) -> bool:
    """Return True if a check has failed and may pass when it is repeated."""
    failed = [one.name for one in results if one.state is State.FAIL]
    return bool(failed) and KV_CONTENT not in failed


async def retried(check: Callable[[], Awaitable[list[Check]]]) -> list[Check]:
    """Return the results of a check, of its last try if it fails."""
    started = now()
    for _ in range(MAX_TRIES - 1):
        results = await check()
        if not is_repeated(results) or now() - started > RETRY_FOR_S:
            return results
        await asyncio.sleep(RETRY_PAUSE_S)
    return await check()


async def within(work: Awaitable[T], seconds: float | None = None) -> T:
    """Wait for `work`, CHECK_TIMEOUT_S if not given otherwise. Raises TimeoutError."""
    async with asyncio.timeout(CHECK_TIMEOUT_S if seconds is None else seconds):
        return await work


async def resolve(host: str) -> list[str]:
    """Return the addresses of a name. Raises OSError or TimeoutError."""
    look_up = partial(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM)
    try:
        answers = await within(call_in_daemon_thread(look_up))
    except UnicodeError as error:
        raise OSError(str(error)) from None
    return sorted({str(one[4][0]) for one in answers})


async def connect(host: str, port: int) -> str:
    """Return why nothing listens there; empty if a connection was accepted."""
    try:
        _, writer = await within(asyncio.open_connection(host, port))
    except (OSError, UnicodeError) as error:
        return reason_of(error, CHECK_TIMEOUT_S)
    writer.transport.abort()
    return ""


async def check_reach(found: Findings, url: str, address: Address, flag: str) -> bool:
    """Check the name and the port of a server. Return False if it cannot be reached."""
    host = address.host
    try:
        addresses = await resolve(host)
    except OSError as error:
        why = error.strerror or reason_of(None, CHECK_TIMEOUT_S)
        cure = f"correct {flag}, or the DNS that this machine uses"
        found.fail("name", f"{url}: {host} cannot be resolved: {why}", cure)
        return False
    if addresses != [host]:  # an IP address is its own one
        found.ok("name", f"{host} is {', '.join(addresses[:MAX_SHOWN])}")
    if why := await connect(host, address.port):
        cure = f"start it there, or correct {flag}"
        if "no answer" in why:
            cure = f"look for a firewall or network policy in between, or correct {flag}"
        found.fail("port", f"{url}: {why}", cure)
        return False
    found.ok("port", f"{address} accepts connections")
    return True


def failure_text(engines: Sequence[Engine], error: Exception, timeout_s: float) -> str:
    """Return why a request through these engines has failed."""
    text = " ".join(str(error).split())[:300]
    engine = next((one for one in engines if text.startswith(f"{one.name}: ")), None)
    return text if engine is None else no_answer(engine.spec.url, error, timeout_s)


def cure_of(error: Exception, usual: str) -> str:
    return error.cure if isinstance(error, CompressedAnswerError) else usual


def timeout_text(engines: Sequence[Engine], timeout_s: float) -> str:
    return no_answer(", ".join(one.spec.url for one in engines), None, timeout_s)


class EngineChecker:
    """Checks one engine and tells the fleet what it reports of itself."""

    def __init__(self, engine: Engine, fleet: Fleet, prober: Prober) -> None:
        self._engine, self._fleet, self._prober = engine, fleet, prober
        self.found = Findings(f"{engine.role} {engine.name}")

    @property
    def checks_from_elsewhere(self) -> list[Check]:
        """Return the checks of an engine that the router reaches, whatever is reached from here."""
        return [
            replace(one, state=State.SKIPPED, text=f"{one.text} (from here)", cure="")
            if one.state is State.FAIL and one.name in REACH
            else one
            for one in self.found.checks
        ]

    async def run(self) -> None:
        flag = f"the address of the {self._engine.role} engine"
        url, address = self._engine.spec.url, self._engine.spec.address
        if not await check_reach(self.found, url, address, flag):
            self._fleet.note_unreachable(self._engine, "not reached")
            return
        try:
            is_healthy = await self._check_health() and await self._check_models()
            if is_healthy:
                await self._check_identity()
                self._fleet.note_probe_passed(self._engine)
        except UpstreamError as error:
            self._fleet.note_probe_failed(self._engine, str(error))
            cure = "look at the engine's log"
            if isinstance(error, TlsError):
                cure = "use https:// for it only if it serves TLS; see --engine-ca-file"
            elif isinstance(error, CompressedAnswerError):
                cure = error.cure
            elif not isinstance(error, ConnectError):
                cure = "is this an engine? Look at its log"
            why = no_answer(url, error, CHECK_TIMEOUT_S)
            self.found.fail("answers", f"{error.phrase}: {why}", cure)
            return
        if is_healthy:
            await self._check_side_channels()

    async def _get(self, path: str) -> CompleteAnswer:
        """Raises UpstreamError."""
        return await self._engine.get(path, now() + CHECK_TIMEOUT_S, MAX_ANSWER_BYTES)

    async def _check_health(self) -> bool:
        started = time.time()
        answer = await self._get(HEALTH_PATH)
        check_clock(self.found, answer.headers, started, time.time())
        if 200 <= answer.status < 300:
            self.found.ok("health", f"/health answers {answer.status}")
            return True
        self._fleet.note_probe_failed(self._engine, f"/health returned {answer.status}")
        cure = "wait until it has loaded its model, or look at its log"
        if answer.status in (401, 403, 404):
            cure = "is this an engine's HTTP port?"
        self.found.fail("health", f"/health answers {answer.status}", cure)
        return False

    async def _check_models(self) -> bool:
        answer = await self._get("/v1/models")
        models = models_in(json_of(answer))
        if models:
            facts = model_facts_in(models)
            self._fleet.note_models(self._engine, *facts)
            self.found.ok("models", f"serves {_listed(sorted(facts.names))}")
            return True
        if self._engine.spec.models:
            self.found.skip("models", "named where the engine is listed, not by its /v1/models")
            return True
        self._fleet.note_probe_failed(self._engine, f"/v1/models returned {answer.status}")
        if answer.status in (401, 403):
            cure = "set --engine-api-key-file to the engine's --api-key"
            self.found.fail("models", f"/v1/models answers {answer.status}{NO_REQUESTS}", cure)
        else:
            cure = "is this an OpenAI-compatible engine?"
            text = f"/v1/models answers {answer.status} without models{NO_REQUESTS}"
            self.found.fail("models", text, cure)
        return False

    async def _check_identity(self) -> None:
        answer = await self._get(IDENTITY_PATH)
        page = json_of(answer)
        capabilities = self._engine.capabilities
        capabilities.is_identity_known = True
        if isinstance(page, dict):
            capabilities.note_identity(page)
            self._fleet.note_identity(self._engine)
        kv = capabilities.kv
        if answer.status == 503:
            why = error_message(parse_object(answer.body) or {}) or "no reason given"
            cure = "look at the engine's log: its own side channel does not answer"
            self.found.fail("identity", f"/disagg/identity answers 503: {why}", cure)
        elif not kv.has_page and await self._check_kv_peer():
            return
        elif not kv.has_page:
            self.found.skip(
                "identity",
                "no page /disagg/identity, so it cannot be compared (a stock engine, or vLLM "
                "without the plugin of disagg-router)",
            )
        elif not kv.has_connector:
            text = "started without --kv-transfer-config, so no KV moves"
            self.found.fail(
                "identity", text, "add --kv-transfer-config (docs/engine-configuration.md)"
            )
        else:
            modes = " and ".join(kv.modes) or "unknown"
            text = f"transfers by {modes}, {len(kv.factors)} facts to compare"
            if why := capabilities.loan_problem:
                text += f"; lends no prefixes: {' '.join(why.split())[:300]}"
            self.found.ok("identity", text)

    async def _check_kv_peer(self) -> bool:
        """Check how an engine that is not ours moves KV. Return False if its pages do not show it:
        then it counts as one with a NixlConnector."""
        await self._prober.fetch_kv_peer(self._engine)
        peer, role = self._engine.capabilities.kv_peer, self._engine.role
        if peer.protocol is SGLANG and peer.mode != role:
            text = f"disaggregation_mode {peer.mode}, but the router uses it as {role.engine}"
            cure = f"start it with --disaggregation-mode {role}, or list it in its own role"
            self.found.fail("KV protocol", text, cure)
        elif peer.protocol is MOONCAKE and role.plays(PREFILL) and not peer.engine_ids:
            where = Address(self._engine.spec.address.host, peer.bootstrap_port)
            cure = "set --bootstrap-port to the engine's VLLM_MOONCAKE_BOOTSTRAP_PORT"
            self.found.fail("KV protocol", f"no bootstrap server of Mooncake at {where}", cure)
        elif peer.protocol is not NIXL:
            ranks = f", {len(peer.engine_ids)} ranks" if len(peer.engine_ids) > 1 else ""
            self.found.ok("KV protocol", f"{peer.protocol}{ranks}")
        return peer.protocol is not NIXL

    async def _check_side_channels(self) -> None:
        endpoints = list(self._engine.capabilities.rank_endpoints.values())
        host = self._engine.spec.address.host
        for at in endpoints[:MAX_SHOWN]:
            where = str(Address(at.remote_host, at.remote_port))
            if is_loopback(at.remote_host) and not is_loopback(host):
                self.found.fail(
                    "side channel",
                    f"it announces {where} to other engines, which is their own machine",
                    "set VLLM_NIXL_SIDE_CHANNEL_HOST to an address of the engine's machine",
                )
            elif why := await connect(at.remote_host, at.remote_port):
                text = f"{where} cannot be reached from here: {why}"
                self.found.skip("side channel", f"{text}; only the other engines need it")
            else:
                self.found.ok("side channel", f"{where} accepts connections")


def check_clock(
    found: Findings, headers: Sequence[tuple[bytes, bytes]], sent: float, received: float
) -> None:
    """Compare the Date header of an answer with this machine's clock, in Unix time."""
    shown = next((value for name, value in headers if name.lower() == b"date"), b"")
    try:
        date = email.utils.parsedate_to_datetime(shown.decode("latin-1")).timestamp()
    except (ValueError, TypeError):
        return
    # The header was written between the two moments, and cut to a whole second.
    skew = min(date + 1 - sent, 0.0) + max(date - received, 0.0)
    if abs(skew) > MAX_SKEW_S:
        text = f"its clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} this one's"
        found.fail("clock", text, "synchronise the clocks (NTP)")
    else:
        found.ok("clock", "agrees with this machine's")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return ", ".join(names[:MAX_SHOWN]) + more
