"""disagg-router doctor: checks a fleet, and says what to do about each fault.

With the router's own options it checks the engines and files that they name. With a URL it checks
the router that runs there, and its engines as far as they can be reached from here.

Exit code 0: no check has failed. 1: some have. 2: wrong usage.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from router.auth.api_keys import Keyring
from router.commands.cli import parser as router_parser
from router.commands.connection_errors import no_answer
from router.commands.console import (
    DEFAULT_URL,
    GREEN,
    RED,
    YELLOW,
    Paint,
    UsageError,
    no_paint,
    number_in,
    paint_for,
    run_with_progress,
)
from router.commands.doctor.checks import Check, Findings, State, retried, within
from router.commands.doctor.fleet_checks import Progress, check_fleet, open_fleet
from router.commands.doctor.router_checks import RouterChecker
from router.commands.router_client import API_KEY, key_headers, router_url
from router.common.tls import TlsContext
from router.common.user_info import without_user_info
from router.fleet.sources.file import address_of
from router.settings import UNSAFE_REUSE, Settings, SettingsError, flag_of, load, read_secret

DESCRIPTION = f"""\
Checks a fleet and prints a line for each check, with what to do if it fails: names, ports, /health,
models, whether prefill and decode engines can exchange KV, a request through each of them, a loan
of one engine's prefix cache to another, and how fast a prompt's KV moves between each two engines.

With the router's options it checks the engines and files that they name. With the URL of a running
router it checks that router (default: {DEFAULT_URL}). The variable {API_KEY} is the API
key, if it is set.
"""
EXAMPLE = """\
examples:
  disagg-router doctor --prefill 10.0.0.1:8100 --decode 10.0.1.1:8200
  disagg-router doctor --config router.yaml --json
  disagg-router doctor http://router:8000
"""
COLOURS = {State.OK: GREEN, State.FAIL: RED, State.SKIPPED: YELLOW}
DEFAULT_TIMEOUT_S = 20.0
# Progress is shown after this time.
SILENT_S = 2.0
REDIS_TIMEOUT_S = 3.0
SOON_S = 14 * 86400.0
SECRETS = ("admin_token", "ui_token", "engine_api_key", "conversation_store_password")


def main(argv: Sequence[str]) -> int:
    shows_all = "--help" not in argv and "-h" not in argv
    parser = router_parser(shows_all, serves=False)
    parser.prog, parser.description, parser.epilog = "disagg-router doctor", DESCRIPTION, EXAMPLE
    parser.usage = "disagg-router doctor [URL] [options of the router] [--json]"
    add = parser.add_argument
    add("url", nargs="?", metavar="URL", help="URL of a running router.")
    add("--json", action="store_true", help="Print one JSON object, not lines.")
    text = f"Longest wait for the answer to a test request (default: {DEFAULT_TIMEOUT_S:g} s)."
    add("--timeout", type=number_in(0.001, 600, unit="s"), metavar="SECONDS", help=text)
    flags = vars(parser.parse_args(argv))
    url, as_json = flags.pop("url", None), flags.pop("json", False)
    timeout_s = flags.pop("timeout", DEFAULT_TIMEOUT_S)
    return parser.run(lambda: _run(url, flags, timeout_s, as_json))


def _run(url: str | None, flags: Mapping[str, Any], timeout_s: float, as_json: bool) -> int:
    settings = None
    if url is None:
        try:
            settings = load(flags)
        except SettingsError as error:
            is_told = bool(flags) or any(name.startswith("DISAGG_ROUTER_") for name in os.environ)
            if is_told:
                raise UsageError(error.problems[0]) from None
            url = DEFAULT_URL
    elif flags:
        raise UsageError("give the URL of a router, or options of a router, not both")
    router = None if url is None else _router(url)
    with _quiet():
        checks = asyncio.run(_check_with_progress(settings, router, timeout_s))
    is_fine = all(check.state is not State.FAIL for check in checks)
    if as_json:
        print(json.dumps({"ok": is_fine, "checks": [asdict(check) for check in checks]}))
    else:
        for line in lines(checks, paint_for(sys.stdout)):
            print(line, flush=True)
    return 0 if is_fine else 1


def _router(url: str) -> RouterChecker:
    given = router_url(url)
    try:
        return RouterChecker(given, address_of(given), key_headers(os.environ))
    except ValueError:
        raise UsageError(f"{url!r} is not a router: give its URL, as in {DEFAULT_URL}") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Log nothing: the checks say what is wrong."""
    logger = logging.getLogger("disagg_router")
    before, logger.disabled = logger.level, False
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


async def _check_with_progress(
    settings: Settings | None, router: RouterChecker | None, timeout_s: float
) -> list[Check]:
    steps, started = ["starting"], time.monotonic()

    def progress() -> str:
        return f"checking {steps[-1]} ({time.monotonic() - started:.0f} s)"

    work = _check(settings, router, timeout_s, steps.append)
    return await run_with_progress(work, progress, silent_s=SILENT_S)


async def _check(
    settings: Settings | None, router: RouterChecker | None, timeout_s: float, show: Progress
) -> list[Check]:
    checks: list[Check] = []
    if settings is not None:
        show("files and stores")
        checks += check_files(settings)
        checks += await retried(partial(check_redis, settings))
    if router is not None:
        show("the router")
        checks += await retried(router.run)
        settings = router.settings()
        if settings is None:
            if router.is_router:
                checks += await retried(lambda: router.check_request((), timeout_s))
            return checks
    assert settings is not None
    num_before = len(checks)
    try:
        async with open_fleet(settings) as state:
            reached = frozenset() if router is None else router.reached
            checks += await check_fleet(state, timeout_s, show, reached)
            if router is not None:
                show("a request through the router")
                engines = state.gateway.fleet.engines
                through = await retried(lambda: router.check_request(engines, timeout_s))
                # Beside the router's other checks.
                checks[num_before:num_before] = through
    except SettingsError as error:
        cure = "correct the settings above"
        checks += [Check("settings", "engines", State.FAIL, p, cure) for p in error.problems]
    return checks


def lines(checks: Sequence[Check], painted: Paint = no_paint) -> Iterator[str]:
    """Yield the sum of the checks, and a line for each of them."""
    failed = sum(check.state is State.FAIL for check in checks)
    if failed:
        yield painted(f"{failed} of {len(checks)} checks failed", RED)
    else:
        yield painted("no check failed", GREEN)
    wide = max((len(check.subject) for check in checks), default=0)
    names = max((len(check.name) for check in checks), default=0)
    for check in checks:
        state = painted(f"{check.state:<7}", COLOURS[check.state])
        cure = f". To do: {check.cure}" if check.cure else ""
        text = f"{check.text}{cure}"
        yield f"{state}  {check.subject:<{wide}}  {check.name:<{names}}  {text}".rstrip()


def check_files(settings: Settings) -> list[Check]:
    """Check the files that the settings name, and settings that are unsafe."""
    found = Findings("settings")
    if settings.conversation_unproven in UNSAFE_REUSE:
        text = f"{settings.conversation_unproven}: stock engines may answer from KV of other tokens"
        found.fail(flag_of("conversation_unproven"), text, "leave the option out, or set tokens")
    if (path := settings.api_keys_file) is not None:
        try:
            keyring = Keyring(path)
        except ValueError as error:
            cure = "correct the file: `disagg-router key NAME` makes an entry"
            found.fail("API keys", f"{path}: {error}", cure)
        else:
            count = len(keyring.keys)
            found.ok("API keys", f"{path}: {count} key{'' if count == 1 else 's'}")
    _check_tls(found, "TLS", settings.served_tls)
    if settings.engine_ca_file or settings.engine_certfile:
        _check_tls(found, "TLS to engines", settings.engine_tls)
    for name in SECRETS:
        if getattr(settings, f"{name}_file") is None:
            continue
        try:
            read_secret(settings, name)
        except SettingsError as error:
            found.fail(flag_of(name), str(error), "correct the file, or the path")
        else:
            found.ok(flag_of(name), "can be read")
    return found.checks


def _check_tls(found: Findings, name: str, load: Callable[[], TlsContext | None]) -> None:
    try:
        context = load()
    except SettingsError as error:
        found.fail(name, str(error), "name files of one certificate and its key, in PEM")
        return
    if context is None:
        return
    left = None if context.expires_at is None else context.expires_at - time.time()
    if left is None:
        found.ok(name, "the files can be used")
    elif left <= 0:
        found.fail(name, f"the certificate expired {-left / 86400:.0f} days ago", "renew it")
    else:
        soon = ": renew it soon" if left < SOON_S else ""
        found.ok(name, f"the certificate is valid for {left / 86400:.0f} days{soon}")


async def check_redis(settings: Settings) -> list[Check]:
    """Check that the shared stores answer."""
    found = Findings("settings")
    wanted: dict[str, tuple[str, Callable[[], str | None]]] = {}
    store = settings.conversation_store
    if store not in ("memory", "off"):
        wanted["conversation store"] = (
            store,
            lambda: read_secret(settings, "conversation_store_password"),
        )
    if settings.api_keys_file is not None and settings.limits_store not in ("memory", store):
        wanted["key limits store"] = settings.limits_store, settings.limits_password
    for name, (url, password) in wanted.items():
        await _check_redis(found, name, url, password)
    return found.checks


async def _check_redis(
    found: Findings, name: str, url: str, password: Callable[[], str | None]
) -> None:
    from redis.exceptions import RedisClusterException, RedisError  # slow, and seldom needed

    from router.common.redis_backend import create_redis_clients

    cure = f"start Redis, or correct --{name.replace(' ', '-')}"
    try:
        clients = create_redis_clients(url, password())
    except SettingsError:
        return  # `check_files` reports it
    except ValueError as error:
        found.fail(name, str(error), cure)
        return
    try:
        ping: Awaitable[Any] = clients.main.ping()
        await within(ping, REDIS_TIMEOUT_S)
    except TimeoutError:
        found.fail(name, no_answer(without_user_info(url), None, REDIS_TIMEOUT_S), cure)
    except (RedisError, RedisClusterException, OSError) as error:
        found.fail(name, no_answer(without_user_info(url), error, REDIS_TIMEOUT_S)[:300], cure)
    else:
        found.ok(name, "answers")
    finally:
        for client in (clients.main, *clients.others):
            try:
                await within(client.aclose(), REDIS_TIMEOUT_S)
            except (RedisError, OSError, TimeoutError):
                continue
