"""disagg-router drain: waits until an engine can be stopped without failing a request.

Exit code 0: the engine is drained. 1: it is not, and the last line has the reason. 2: wrong usage.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from router.commands.console import CommandError, CommandParser, TerminalLine, UsageError, number_in
from router.commands.router_client import (
    ask_router,
    error_message,
    http_url,
    token_headers,
    with_scheme,
)
from router.fleet.sources.file import address_of
from router.openai.answers import parse_object
from router.settings import ADMIN_URL, variable_of

DEFAULT_ADMIN = "http://127.0.0.1:8002"
TOKEN, TOKEN_FILE = variable_of("admin_token"), variable_of("admin_token_file")
POLL_INTERVAL_S = 1.0
# The command gives up after this many failed polls of a router in a row.
MAX_FAILED_POLLS = 3
MAX_LISTED_ENGINES = 20
DESCRIPTION = f"""\
Drains an engine: the router sends it no new requests, running requests continue, and a prefill
engine keeps its KV until decode engines have read it. Exits with 0 as soon as the engine can be
stopped.

{ADMIN_URL} has the URL of the admin API (of several routers with spaces between),
{TOKEN} its token, or {TOKEN_FILE} a file with the token.
"""


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("disagg-router drain", DESCRIPTION)
    add = parser.add_argument
    add_engine(parser)
    text = "Return when the engine is drained (the default), or at once."
    add("--wait", action=argparse.BooleanOptionalAction, default=True, help=text)
    text = "Longest wait (default: 600 s); then exit with 1, and the drain continues."
    seconds = number_in(0.001, 1e7, unit="s")
    add("--timeout", type=seconds, default=600.0, metavar="SECONDS", help=text)
    add = parser.add_mutually_exclusive_group().add_argument
    text = "Move running streams to other engines; default: they run to their end."
    add("--migrate", action="store_true", help=text)
    add("--resume", action="store_true", help="End the drain: the engine gets requests again.")
    options = parser.parse_args(argv)
    return parser.run(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    name, admins = engine_name(options.engine), admin_clients(options.admin)
    end = time.monotonic() + options.timeout
    with TerminalLine(sys.stdout) as progress:
        action = "resume" if options.resume else drain_action(options.migrate)
        engines = post_to_all(admins, name, action)
        if options.resume:
            progress.show(f"{name} serves")
        elif not options.wait:
            progress.show(f"{name} drains")
        else:
            while not all(engine.get("drained") for engine in engines):
                progress.show(_status(name, engines))
                if time.monotonic() + POLL_INTERVAL_S > end:
                    raise CommandError(f"{_status(name, engines)}, after {options.timeout:g} s")
                time.sleep(POLL_INTERVAL_S)
                engines = _poll_all(admins, name)
            progress.show(f"{name} is drained")
    return 0


def add_engine(parser: CommandParser) -> None:
    """Add the arguments that name an engine and the admin APIs of its routers."""
    text = "The engine: http://host:port, or host:port."
    parser.add_argument("engine", metavar="URL", help=text)
    text = f"A router's admin API; repeat it for several routers (default: {DEFAULT_ADMIN})."
    parser.add_argument("--admin", action="append", metavar="URL", help=text)


def admin_clients(urls: Sequence[str] | None) -> list[AdminClient]:
    """Return clients of these admin APIs, by default of those in ADMIN_URL. Raises UsageError."""
    urls = urls or os.environ.get(ADMIN_URL, "").replace(",", " ").split()
    headers = token_headers("admin_token", os.environ)
    return [AdminClient(url, headers) for url in urls or [DEFAULT_ADMIN]]


class AdminClient:
    """The admin API of one router."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        """Raises UsageError."""
        if http_url(url) is None:
            raise UsageError(f"{url!r} is not an admin API: give its URL, as in {DEFAULT_ADMIN}")
        self.url = url.rstrip("/")
        self._headers = headers
        self._failed_polls = 0

    def post(self, name: str, action: str) -> dict[str, Any]:
        """Drain or resume an engine and return its state. Raises CommandError."""
        answer = self._request("POST", f"/admin/engines/{name}/{action}")
        if answer.status_code == 404:
            raise self.unknown_engine(name, self.engines())
        return self._engine(answer)

    def poll(self, name: str) -> dict[str, Any] | None:
        """Return the engine's state: None if it is gone, {} if the router did not answer.

        Raises CommandError after several failures in a row.
        """
        try:
            answer = self._request("GET", f"/admin/engines/{name}")
        except CommandError:
            self._failed_polls += 1
            if self._failed_polls >= MAX_FAILED_POLLS:
                raise
            return {}
        self._failed_polls = 0
        return None if answer.status_code == 404 else self._engine(answer)

    def _request(self, method: str, path: str) -> httpx.Response:
        try:
            return ask_router(method, f"{self.url}{path}", self._headers)
        except CommandError as error:
            hint = "a router has an admin API if started with --admin-port; --admin gives its URL"
            raise CommandError(f"{error} ({hint})") from error

    def _engine(self, answer: httpx.Response) -> dict[str, Any]:
        content = parse_object(answer.content) or {}
        if answer.status_code == 200 and isinstance(content.get("drained"), bool):
            return content
        raise self._error(answer.status_code, content)

    def engines(self) -> list[dict[str, Any]]:
        """Return the router's engines, each as an `EngineView` in JSON. Raises CommandError."""
        answer = self._request("GET", "/admin/engines")
        content = parse_object(answer.content) or {}
        engines = content.get("engines")
        if answer.status_code != 200 or not isinstance(engines, list):
            raise self._error(answer.status_code, content)
        return [engine for engine in engines if isinstance(engine, dict)]

    def _error(self, status: int, content: Mapping[str, Any]) -> CommandError:
        text = error_message(content) or "is this the admin API?"
        if status == 401:
            text += f" (from {TOKEN}, or the file that {TOKEN_FILE} names)"
        return CommandError(f"{self.url} answers {status}: {text}")

    def unknown_engine(self, name: str, engines: Sequence[Mapping[str, Any]]) -> CommandError:
        """Return the error that lists the engines that the router has."""
        more = len(engines) - MAX_LISTED_ENGINES
        listed = ", ".join(str(engine.get("name")) for engine in engines[:MAX_LISTED_ENGINES])
        others = f"; there are {listed}" if listed else ", nor any other"
        also = f" and {more} more" if more > 0 else ""
        return CommandError(f"{self.url} has no engine {name}{others}{also}")


def drain_action(migrates: bool) -> str:
    """Return the action of the admin API that drains an engine."""
    return "drain?migrate=true" if migrates else "drain"


def post_to_all(admins: Sequence[AdminClient], name: str, action: str) -> list[dict[str, Any]]:
    """Post to all routers, even if one fails. Raises CommandError, which names the others."""
    engines, problems = {}, []
    for admin in admins:
        try:
            engines[admin.url] = admin.post(name, action)
        except CommandError as error:
            problems.append(str(error))
    if problems:
        problems += [f"succeeded only at {' '.join(engines)}"] if engines else []
        raise CommandError("\n".join(problems))
    return [*engines.values()]


def _poll_all(admins: Sequence[AdminClient], name: str) -> list[dict[str, Any]]:
    engines = []
    for admin in admins:
        engine = admin.poll(name)
        if engine is None:
            engine = {"drained": True}  # an engine is removed only when it is idle
        elif engine.get("intent") == "serving":
            why = "it was resumed, or that router was restarted"
            raise CommandError(f"{name} serves again at {admin.url}: {why}")
        engines.append(engine)
    return engines


def _status(name: str, engines: Sequence[Mapping[str, Any]]) -> str:
    running = sum(engine.get("in_flight", 0) for engine in engines)
    holding = sum(engine.get("holding", 0) for engine in engines)
    if not running and not holding:
        return f"{name} drains: not every worker of the routers answers"
    leases = f"{holding} KV lease{'' if holding == 1 else 's'}"
    return f"{name} drains: {running} running, {leases}"


def engine_name(given: str) -> str:
    """Return the engine's name, which is its address. Raises UsageError."""
    url = with_scheme(given)
    try:
        if url is given or ":" in given:  # without a scheme, a port is required
            return str(address_of(url))
    except ValueError:
        pass
    raise UsageError(f"{given!r} is not an engine: give http://host:port, or host:port")
