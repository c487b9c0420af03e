"""Checks of a fleet as a whole: roles, models, pairs of engines, and requests through them.

The engines are those that the settings name, by any source. They are compared by the functions that
the running router uses.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Container, Sequence
from functools import partial
from itertools import product
from random import Random

from router.commands.doctor.checks import (
    Check,
    EngineChecker,
    Findings,
    State,
    retried,
)
from router.commands.doctor.loan_check import check_loan
from router.commands.doctor.rate_check import check_rates, choose_fitting_pairs
from router.commands.doctor.transfer_check import CheckedPair, check_transfer, healthy_engines
from router.fleet.engine import DECODE, LEGS, PREFILL, Engine, EngineRole, Health
from router.fleet.kv_facts import SECRET_NONE
from router.fleet.kv_protocol import NIXL
from router.fleet.partners import FindingKind
from router.proxy.gateway import Gateway
from router.proxy.plan import PULL, choose_mode
from router.proxy.warmup import PROMPT_TOKEN_IDS
from router.routing.route import Route
from router.server.app import build
from router.server.router_state import RouterState, state_of
from router.settings import Settings

LISTING_TIMEOUT_S = 5.0
# The test request: four blocks of sixteen tokens.
TEST_PROMPT_TOKENS = 64
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
Progress = Callable[[str], None]


@contextlib.asynccontextmanager
async def open_fleet(settings: Settings) -> AsyncIterator[RouterState]:
    """Build a router that does not listen or probe, and wait for its sources. Raises
    SettingsError."""
    state = state_of(build(settings.model_copy(update=QUIET)))
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
    fitting, num_fitting = choose_fitting_pairs(fleet.engines)
    pairs = choose_pairs(fleet.engines, fitting)
    progress(f"test requests through {len(pairs)} pairs of engines")
    limit = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)

    async def test(pair: CheckedPair) -> list[Check]:
        async with limit:
            return await check_pair(gateway, pair, timeout_s)

    for found in await asyncio.gather(*(retried(partial(test, pair)) for pair in pairs)):
        checks += found
    failed = {check.subject for check in checks if check.state is State.FAIL}
    measured = [pair for pair in fitting if str(pair) not in failed]
    checks += await check_rates(gateway, measured, num_fitting, timeout_s, progress)
    return checks


def check_roles(engines: Sequence[Engine]) -> list[Check]:
    """Check that there are engines of both roles, and that they serve the same models."""
    found = Findings("fleet")
    served: dict[EngineRole, set[str]] = {}
    for role in LEGS:
        listed = [engine for engine in engines if engine.role.plays(role)]
        healthy = healthy_engines(engines, role)
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


def choose_pairs(
    engines: Sequence[Engine], fitting: Sequence[CheckedPair]
) -> Sequence[CheckedPair]:
    """Return pairs in which each healthy engine occurs, with a partner that fits if it has one."""
    sides = (healthy_engines(engines, role)[:MAX_CHECKED_ENGINES] for role in LEGS)
    possible = [CheckedPair(p, d) for p, d in product(*sides) if p is not d]
    pairs: list[CheckedPair] = []
    met: set[Engine] = set()
    for pair in (*fitting, *possible):
        if not met.issuperset(pair):
            pairs.append(pair)
            met.update(pair)
    return pairs[:MAX_CHECKED_ENGINES]


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
        await check_transfer(gateway, found, "KV moved", pair, timeout_s, _test_prompt())
        return found.checks
    mode = gateway.limits.transfer_mode
    route = Route(pair.prefiller.group, (pair.prefiller,), (pair.decoder,))
    modes = {"push" if e.capabilities.supports_push else "pull" for e in pair}
    if mode != "auto" and p.modes and d.modes and mode not in modes:
        cure = "set --transfer-mode auto, or the engines' kv_connector"
        found.fail("transfer mode", f"--transfer-mode {mode}, but the engines {modes.pop()}", cure)
    else:
        found.ok("transfer mode", str(choose_mode(route, mode)))
    moved = await check_transfer(gateway, found, "KV moved", pair, timeout_s, _test_prompt())
    if moved and p.has_page and d.has_page and choose_mode(route, mode) is PULL:
        # In the next turn of a conversation, the prefill engine reads from the decode engine.
        back = CheckedPair(pair.decoder, pair.prefiller)
        await check_transfer(gateway, found, "KV moved back", back, timeout_s, _test_prompt())
    return found.checks


def _test_prompt() -> list[int]:
    return Random().choices(PROMPT_TOKEN_IDS, k=TEST_PROMPT_TOKENS)
