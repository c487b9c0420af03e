"""Checks of a fleet as a whole: roles, models, pairs of engines, and requests through them.

The engines are those that the settings name, by any source. They are compared by the functions that
the running router uses.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Container, Mapping, Sequence
from functools import partial
from random import Random
from time import monotonic as now
from typing import NamedTuple

from router.commands.doctor.checks import (
    Check,
    EngineChecker,
    Findings,
    cure_of,
    failure_text,
    retried,
    timeout_text,
)
from router.commands.doctor.loan_check import check_loan
from router.fleet.engine import DECODE, LEGS, PREFILL, Engine, EngineRole, Health
from router.fleet.fleet import facts_of
from router.fleet.kv_facts import SECRET_NONE, Difference
from router.fleet.kv_protocol import NIXL, SGLANG, TRTLLM
from router.fleet.metrics_page import METRICS_PATH
from router.fleet.pair_rates import SLOW_CURE, PairRates, find_slow, rate_text
from router.fleet.partners import FindingKind, find_difference
from router.fleet.probes import json_of
from router.http_client.errors import UpstreamError
from router.openai.errors import EngineError, RequestError
from router.proxy.gateway import Gateway
from router.proxy.plan import PULL, choose_mode
from router.proxy.warmup import PairAnswer, send_test_request
from router.routing.route import Route
from router.server.app import build
from router.server.router_state import RouterState, state_of
from router.settings import Settings
from router.ui.engine_reports import (
    LEASES_PATH,
    Transfer,
    get_page,
    hash_request_id,
    parse_transfers,
)

LISTING_TIMEOUT_S = 5.0
# The test request: four blocks of sixteen tokens.
TEST_PROMPT_TOKENS = 64
# An engine reports a transfer a moment after the answer.
TRANSFER_REPORT_TIMEOUT_S = 2.0
REPORT_POLL_S = 0.1
MAX_CONCURRENT_ENGINES = 64
MAX_CONCURRENT_REQUESTS = 4
MAX_CHECKED_ENGINES = 16
# Settings that do not matter for the checks, or that have a check of their own.
QUIET = {
    "access_log": False,
    "warm_up": "off",
    "ui": False,
    "ui_port": None,
    "admin_port": None,
    "api_keys_file": None,
    "key_limits_store": None,
    "conversation_store": "off",
    "tls_certfile": None,
    "tls_keyfile": None,
    "tls_client_ca": None,
}
# Findings that the checks of single engines and of pairs do not report.
FINDING_NAMES = {FindingKind.SHARED_ID: "engine ids", FindingKind.LEASES_DIFFER: "leases"}
LOADED_METRIC = "vllm:prompt_tokens_by_source_total"
LOADED_TOKENS = re.compile(
    rb'^%b\{[^}]*source="external_kv_transfer"[^}]*\} (\S{1,32})$' % LOADED_METRIC.encode(), re.M
)
Progress = Callable[[str], None]


class CheckedPair(NamedTuple):
    prefiller: Engine
    decoder: Engine

    def __str__(self) -> str:
        return f"{self.prefiller.name} -> {self.decoder.name}"

    @property
    def difference(self) -> Difference | None:
        return find_difference(facts_of(self.prefiller), facts_of(self.decoder))


@contextlib.asynccontextmanager
async def open_fleet(settings: Settings) -> AsyncIterator[RouterState]:
    """Build a router that does not listen or probe, and wait for its sources. Raises
    SettingsError."""
    state = state_of(build(settings.model_copy(update=QUIET)))
    state.gateway.fleet.pair_rates = PairRates(from_start=True)
    discovery = asyncio.create_task(state.registry.run())
    try:
        await state.registry.wait_for_sources(LISTING_TIMEOUT_S)
        yield state
    finally:
        discovery.cancel()
        await asyncio.gather(discovery, return_exceptions=True)
        await state.gateway.close()
        state.gateway.fleet.close()


async def check_fleet(
    state: RouterState, timeout_s: float, progress: Progress, reached: Container[str] = ()
) -> list[Check]:
    """Check each engine, all of them at a time, then what is between them.

    `reached` are the engines that a running router reaches, which need not be reached from here.
    """
    gateway, fleet = state.gateway, state.gateway.fleet
    sources = Findings("discovery")
    for name, problem in state.registry.problems().items():
        sources.fail(name, problem, "see docs/discovery.md")
    engines = fleet.engines
    progress(f"{len(engines)} engines")
    limit = asyncio.Semaphore(MAX_CONCURRENT_ENGINES)

    async def run(engine: Engine) -> list[Check]:
        async with limit:
            checker = EngineChecker(engine, fleet, state.prober)
            await checker.run()
            is_reached = engine.name in reached
            return checker.checks_from_elsewhere if is_reached else checker.found.checks

    of_engines = await asyncio.gather(*(retried(partial(run, engine)) for engine in engines))
    with fleet.batch_changes():
        pass  # groups follow from what the engines have reported
    checks = list(sources.checks)
    for found in of_engines:
        checks += found
    if all(one.health is Health.HEALTHY or one.name not in reached for one in fleet.engines):
        checks += check_roles(fleet.engines)
    checks += check_shared_facts(gateway)
    progress("a loan between two engines")
    checks += await retried(lambda: check_loan(fleet.engines, timeout_s))
    pairs = choose_pairs(fleet.engines)
    progress(f"test requests through {len(pairs)} pairs of engines")
    limit = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)

    async def test(pair: CheckedPair) -> list[Check]:
        async with limit:
            return await check_pair(gateway, pair, timeout_s)

    for found in await asyncio.gather(*(retried(partial(test, pair)) for pair in pairs)):
        checks += found
    if not reached:  # else the router knows the rates of the last minute
        checks += await check_pair_rates(state)
    return checks


def _healthy(engines: Sequence[Engine], role: EngineRole) -> list[Engine]:
    found = [engine for engine in engines if engine.health is Health.HEALTHY]
    return [engine for engine in found if engine.role.plays(role)]


def check_roles(engines: Sequence[Engine]) -> list[Check]:
    """Check that there are engines of both roles, and that they serve the same models."""
    found = Findings("fleet")
    served: dict[EngineRole, set[str]] = {}
    for role in LEGS:
        listed = [engine for engine in engines if engine.role.plays(role)]
        healthy = _healthy(engines, role)
        served[role] = {model for engine in healthy for model in engine.models or ()}
        if not listed:
            cure = f"name one with --{role}, or see docs/discovery.md"
            found.fail(f"{role} engines", "none is known", cure)
        elif not healthy:
            cure = "see the lines above"
            found.fail(f"{role} engines", f"none of {len(listed)} is healthy", cure)
    p, d = served[PREFILL], served[DECODE]
    if not p or not d:
        return found.checks
    cure = "give engines of both roles the same --served-model-name"
    if only := sorted(p - d):
        text = f"{', '.join(only[:3])}: served by prefill engines alone, so requests get 503"
        found.fail("models", text, cure)
    if only := sorted(d - p):
        text = f"{', '.join(only[:3])}: served by decode engines alone, which compute all prompts"
        if p & d:
            found.skip("models", text)
        else:
            found.fail("models", text, cure)
    if p == d:
        found.ok("models", f"engines of both roles serve {', '.join(sorted(p)[:3])}")
    return found.checks


def check_shared_facts(gateway: Gateway) -> list[Check]:
    """Check engine ids, secrets and leases of all engines with a KV connector."""
    found, fleet = Findings("fleet"), gateway.fleet
    report = fleet.compare()
    for finding in report.findings:
        name = FINDING_NAMES.get(finding.kind)
        if name is not None:
            found.fail(name, finding.text, finding.cure)
    pages = {one.name: one.capabilities.kv for one in fleet.engines if one.capabilities.kv.modes}
    leases = {kv.lease_seconds for kv in pages.values()} - {None}
    if len(leases) == 1 and len(pages) > 1:
        found.ok("leases", f"all last {leases.pop():g} s")
    secrets = {kv.secret for kv in pages.values()} - {""}
    without = [name for name, kv in pages.items() if kv.secret == SECRET_NONE]
    if secrets == {SECRET_NONE}:
        text = "no engine has one: anyone who reaches a side channel can read KV (docs/security.md)"
        found.skip("secret", text)
    elif without:
        text = f"none at {', '.join(without[:3])}, but at other engines"
        found.fail("secret", text, "give all engines the same side_channel_secret_file")
    elif secrets:
        found.ok("secret", "set at all engines")
    return found.checks


def choose_pairs(engines: Sequence[Engine]) -> list[CheckedPair]:
    """Return pairs in which each healthy engine occurs, with a partner that fits if it has one."""
    prefillers, decoders = _healthy(engines, PREFILL), _healthy(engines, DECODE)
    pairs: list[CheckedPair] = []

    def add(possible: Sequence[CheckedPair]) -> None:
        possible = [pair for pair in possible if pair.prefiller is not pair.decoder]
        fitting = [pair for pair in possible if pair.difference is None] or possible
        if fitting:  # partners take turns
            pairs.append(fitting[len(pairs) % len(fitting)])

    for decoder in decoders[:MAX_CHECKED_ENGINES]:
        add([CheckedPair(prefiller, decoder) for prefiller in prefillers[:MAX_CHECKED_ENGINES]])
    for prefiller in prefillers[:MAX_CHECKED_ENGINES]:
        if all(pair.prefiller is not prefiller for pair in pairs):
            add([CheckedPair(prefiller, decoder) for decoder in decoders[:MAX_CHECKED_ENGINES]])
    return list(dict.fromkeys(pairs))[:MAX_CHECKED_ENGINES]


async def check_pair_rates(state: RouterState) -> list[Check]:
    """Check the rates at which engines have moved KV since their start."""
    found, rates = Findings("fleet"), state.gateway.fleet.pair_rates
    for engine in state.gateway.fleet.engines[:MAX_CONCURRENT_ENGINES]:
        if engine.health is Health.HEALTHY:
            with contextlib.suppress(UpstreamError):
                await state.prober.fetch_transfers(engine)
    known = rates.rates(now())
    slow = find_slow(known)
    for pair, one in slow.items():
        found.fail("KV rate", one.describe(pair), SLOW_CURE)
    if known and not slow:
        least = rate_text(min(one.bytes_per_second for one in known.values()))
        found.ok("KV rate", f"{least} or more, of {len(known)} pairs")
    return found.checks


async def check_pair(gateway: Gateway, pair: CheckedPair, timeout_s: float) -> list[Check]:
    """Compare two engines, and send a request through them if they fit."""
    found = Findings(str(pair))
    p, d = (engine.capabilities.kv for engine in pair)
    if (difference := pair.difference) is not None:
        found.fail("engines differ", difference.text, difference.cure)
        found.skip("KV moved", "no request was sent")
        return found.checks
    if p.has_page and d.has_page:
        found.ok("engines agree", f"{len(p.factors)} facts are equal")
    else:
        without = " and ".join(e.name for e in pair if not e.capabilities.kv.has_page)
        found.skip("engines agree", f"{without} cannot be compared")
    protocol = pair.prefiller.kv_protocol
    if protocol is not NIXL:
        found.ok("KV protocol", protocol)
        await _check_moves(gateway, found, "KV moved", pair, timeout_s)
        return found.checks
    mode = gateway.limits.transfer_mode
    route = Route(pair.prefiller.group, (pair.prefiller,), (pair.decoder,))
    modes = {"push" if e.capabilities.supports_push else "pull" for e in pair}
    if mode != "auto" and p.modes and d.modes and mode not in modes:
        cure = "set --transfer-mode auto, or the engines' kv_connector"
        found.fail("transfer mode", f"--transfer-mode {mode}, but the engines {modes.pop()}", cure)
    else:
        found.ok("transfer mode", str(choose_mode(route, mode)))
    moved = await _check_moves(gateway, found, "KV moved", pair, timeout_s)
    if moved and p.has_page and d.has_page and choose_mode(route, mode) is PULL:
        # In the next turn of a conversation, the prefill engine reads from the decode engine.
        back = CheckedPair(pair.decoder, pair.prefiller)
        await _check_moves(gateway, found, "KV moved back", back, timeout_s)
    return found.checks


async def _check_moves(
    gateway: Gateway, found: Findings, name: str, pair: CheckedPair, timeout_s: float
) -> bool:
    """Send a request through a pair, and report whether KV moved. Return whether it did."""
    has_page = pair.decoder.capabilities.kv.has_page
    before = None if has_page else await _loaded_tokens(pair.decoder)
    try:
        async with asyncio.timeout(timeout_s):
            answer = await send_test_request(gateway, *pair, Random(), TEST_PROMPT_TOKENS)
    except TimeoutError:
        cure = "look at the logs of both engines, or set --timeout"
        found.fail(name, timeout_text(pair, timeout_s), cure)
    except (UpstreamError, EngineError, RequestError) as error:
        cure = f"look at the log of {pair.decoder.name}: can it reach the side channel and UCX "
        cure += f"port of {pair.prefiller.name}?"
        found.fail(name, f"no: {failure_text(pair, error, timeout_s)}", cure_of(error, cure))
    else:
        return await _check_moved(found, name, pair, answer, before)
    return False


async def _check_moved(
    found: Findings, name: str, pair: CheckedPair, answer: PairAnswer, before: float | None
) -> bool:
    """`before` are the prompt tokens that a stock decode engine had loaded before the request."""
    if not answer.offers_kv:
        text = f"no: {pair.prefiller.name} sends no kv_transfer_params"
        found.fail(name, text, "start it with --kv-transfer-config (docs/engine-configuration.md)")
        return False
    moved, tells = await find_transfer(pair, answer.request_id)
    if moved is not None:
        blocks = f"{moved.blocks} block{'' if moved.blocks == 1 else 's'}"
        found.ok(name, f"yes, {blocks} in {moved.seconds * 1000:.1f} ms")
        return True
    if tells:
        text = f"no: {pair.decoder.name} has computed the prompt itself"
        found.fail(name, text, "look at its log for the reason")
    elif pair.prefiller.kv_protocol in (SGLANG, TRTLLM):
        found.ok(name, "yes: the decode engine has answered, and computes no such prompt itself")
        return True
    elif before is None:
        text = "answered, but the engines do not report transfers: no page /disagg/leases, nor "
        found.skip(name, text + "vLLM's metric of loaded prompt tokens")
    elif tokens := await _wait_for_tokens(pair.decoder, before):
        found.ok(name, f"yes, {tokens:.0f} tokens")
        return True
    else:
        text = f"answered, but {LOADED_METRIC} has not grown at the decode engine: it may have "
        found.skip(name, text + "computed the prompt itself")
    return False


async def _wait_for_tokens(engine: Engine, before: float) -> float:
    """Return how many loaded tokens more a stock engine counts; 0 if none in time."""
    latest = now() + TRANSFER_REPORT_TIMEOUT_S
    while True:
        more = (await _loaded_tokens(engine) or 0.0) - before
        if more > 0 or now() >= latest:
            return max(more, 0.0)
        await asyncio.sleep(REPORT_POLL_S)


async def _loaded_tokens(engine: Engine) -> float | None:
    """Return the prompt tokens that a stock engine has loaded from others, by whatever connector;
    None if it has no such metric."""
    answer = await get_page(engine, METRICS_PATH)
    found = [] if answer is None else LOADED_TOKENS.findall(answer.body)
    return sum(map(float, found)) if found else None


async def find_transfer(engines: Sequence[Engine], request_id: str) -> tuple[Transfer | None, bool]:
    """Return a request's transfer, if an engine reports it in time; and whether engines report
    transfers at all."""
    digest, latest = hash_request_id(request_id), now() + TRANSFER_REPORT_TIMEOUT_S
    while True:
        pages = await asyncio.gather(*map(_transfers_of, engines))
        for page in pages:
            for operation in ("READ", "WRITE"):
                if page is not None and (operation, digest) in page:
                    return page[operation, digest], True
        tells = any(page is not None for page in pages)
        if not tells or now() >= latest:
            return None, tells
        await asyncio.sleep(REPORT_POLL_S)


async def _transfers_of(engine: Engine) -> Mapping[tuple[str, str], Transfer] | None:
    answer = await get_page(engine, LEASES_PATH)
    content = None if answer is None else json_of(answer)
    return None if content is None else parse_transfers(content, now()).transfers
