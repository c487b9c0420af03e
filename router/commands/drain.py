"""disagg-router drain: an engine gets nothing new, and this returns when nobody needs it any more.

Exit code 0: it is drained. 1: it is not, and the last line says why. 2: wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from router.commands.arguments import Parser
from router.commands.router_client import EndlessError, Remote, Said, reason_of, with_scheme
from router.fleet.sources.file import address_of
from router.settings import ADMIN_URL, variable_of

PROGRAM = "disagg-router drain"
DEFAULT_ADMIN = "http://127.0.0.1:8002"
TOKEN, TOKEN_FILE = variable_of("admin_token"), variable_of("admin_token_file")
# Seconds for one answer, and between two questions; bytes of an answer.
PATIENCE = 10.0
INTERVAL = 1.0
LARGEST = 16 * 1024 * 1024
# So often in a row a router may not answer while it is waited for.
MISSES = 3
MOST_NAMED = 20
DESCRIPTION = f"""\
Lets an engine finish: it gets no new requests from the router, those that it has go on, and a
prefiller keeps its KV until decoders have read it. Exits with 0 as soon as it may be stopped.

{ADMIN_URL} has the admin API's address (several with spaces between; all are told),
{TOKEN} its token, or {TOKEN_FILE} a file with it.
"""


class DrainError(Exception):
    """One line for people."""


class UsageError(Exception):
    pass


@dataclass(frozen=True, slots=True)
class Options:
    name: str
    admins: Sequence[str]
    token: str | None
    resumes: bool
    waits: bool
    timeout: float


def main(argv: Sequence[str], clock: Callable[[], float] = time.monotonic) -> int:
    parser = _parser()
    try:
        options = _options(parser.parse_args(argv), os.environ)
    except UsageError as error:
        parser.error(str(error))
    try:
        with Progress() as progress:
            _run(options, progress, clock)
    except DrainError as error:
        for line in str(error).splitlines():
            print(f"{PROGRAM}: error: {line}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


class Progress:
    """A line for each change, or in a terminal one line that changes."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._said = ""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_terminal and self._said:
            print(flush=True)

    def say(self, line: str) -> None:
        if line == self._said:
            return
        before, self._said = self._said, line
        if self._is_terminal:
            print(f"\r{line.ljust(len(before))}", end="", flush=True)
        else:
            print(line, flush=True)


class Admin:
    """The admin API of one router."""

    def __init__(self, url: str, token: str | None) -> None:
        self.url = url
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._remote = Remote(PATIENCE, LARGEST, headers)
        self._misses = 0

    def tell(self, name: str, what: str) -> dict[str, Any]:
        """The engine, as it is then. Raises DrainError."""
        answer = self._ask("POST", f"/admin/engines/{name}/{what}")
        if answer.status == 404:
            raise DrainError(f"{self.url} knows no engine {name}{self._names()}")
        return self._engine(answer)

    def look(self, name: str) -> dict[str, Any] | None:
        """None when it is gone, or the router did not answer this once. Raises DrainError."""
        try:
            answer = self._ask("GET", f"/admin/engines/{name}")
        except DrainError:
            self._misses += 1
            if self._misses >= MISSES:
                raise
            return {}
        self._misses = 0
        return None if answer.status == 404 else self._engine(answer)

    def close(self) -> None:
        self._remote.close()

    def _ask(self, method: str, path: str) -> Said:
        """Raises DrainError."""
        try:
            return self._remote.ask(method, f"{self.url}{path}")
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise DrainError(f"no answer of {self.url}: {reason_of(error)}") from None
        except EndlessError as error:
            raise DrainError(str(error)) from None

    def _engine(self, answer: Said) -> dict[str, Any]:
        """Raises DrainError."""
        content = _json(answer)
        if answer.status == 200 and isinstance(content.get("drained"), bool):
            return content
        error = content.get("error")
        told = error.get("message") if isinstance(error, dict) else "is this the admin API?"
        raise DrainError(f"{self.url} says {answer.status}: {' '.join(str(told)[:500].split())}")

    def _names(self) -> str:
        """Raises DrainError."""
        engines = _json(self._ask("GET", "/admin/engines")).get("engines")
        names = [str(e.get("name")) for e in engines or () if isinstance(e, dict)]
        if not names:
            return ", nor any other"
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        return f"; there are {', '.join(names[:MOST_NAMED])}{more}"


def _run(options: Options, progress: Progress, clock: Callable[[], float]) -> None:
    """Raises DrainError."""
    end = clock() + options.timeout
    admins = [Admin(url, options.token) for url in options.admins]
    try:
        engines = _tell_all(admins, options.name, "resume" if options.resumes else "drain")
        if options.resumes:
            return progress.say(f"{options.name} serves")
        if not options.waits:
            return progress.say(f"{options.name} drains")
        while not all(engine.get("drained") for engine in engines):
            progress.say(_status(options.name, engines))
            if clock() + INTERVAL > end:
                raise DrainError(f"{_status(options.name, engines)}, after {options.timeout:g} s")
            time.sleep(INTERVAL)
            engines = _look_at_all(admins, options.name)
        progress.say(f"{options.name} is drained")
    finally:
        for admin in admins:
            admin.close()


def _tell_all(admins: Sequence[Admin], name: str, what: str) -> list[dict[str, Any]]:
    """All are told, even if one cannot be. Raises DrainError."""
    engines, problems = [], []
    for admin in admins:
        try:
            engines.append(admin.tell(name, what))
        except DrainError as error:
            problems.append(str(error))
    if problems:
        raise DrainError("\n".join(problems))
    return engines


def _look_at_all(admins: Sequence[Admin], name: str) -> list[dict[str, Any]]:
    """Raises DrainError."""
    engines = []
    for admin in admins:
        engine = admin.look(name)
        if engine is None:
            engine = {"drained": True}  # it left, which it does not before it is idle
        elif engine.get("intent") == "serving":
            why = "it was resumed, or that router was started anew"
            raise DrainError(f"{name} serves again at {admin.url}: {why}")
        engines.append(engine)
    return engines


def _status(name: str, engines: Sequence[Mapping[str, Any]]) -> str:
    running = sum(engine.get("in_flight", 0) for engine in engines)
    holding = sum(engine.get("holding", 0) for engine in engines)
    if not running and not holding:
        return f"{name} drains: not every worker of its routers answers"
    return f"{name} drains: {running} running, {holding} holding KV"


def _json(answer: Said) -> dict[str, Any]:
    try:
        content = json.loads(answer.content)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _options(given: argparse.Namespace, variables: Mapping[str, str]) -> Options:
    """Raises UsageError."""
    url = with_scheme(given.url)
    try:
        name = str(address_of(url))
    except ValueError:
        name = ""
    if not name or (url is not given.url and ":" not in given.url):
        raise UsageError(f"{given.url!r} is no engine: give http://host:port, or host:port")
    if not 0 < given.timeout <= 1e7:
        raise UsageError("--timeout: not a number of seconds above 0")
    admins = given.admin or variables.get(ADMIN_URL, "").replace(",", " ").split()
    admins = [_admin(url) for url in admins or [DEFAULT_ADMIN]]
    waits = given.wait and not given.resume
    return Options(name, admins, _token(variables), given.resume, waits, given.timeout)


def _admin(url: str) -> str:
    """Raises UsageError."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UsageError(f"{url!r} is no admin API: give its URL, as in {DEFAULT_ADMIN}")
    return url.rstrip("/")


def _token(variables: Mapping[str, str]) -> str | None:
    """Raises UsageError."""
    token = variables.get(TOKEN)
    if token is None and TOKEN_FILE in variables:
        path = Path(variables[TOKEN_FILE])
        try:
            token = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise UsageError(f"{TOKEN_FILE} {path}: {reason}") from None
    if token is not None and not (token.isascii() and token.isprintable()):
        raise UsageError(f"the token of {TOKEN} is none: ASCII without line breaks")
    return token


def _parser() -> Parser:
    parser = Parser(
        prog=PROGRAM,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("url", metavar="URL", help="The engine's: http://host:port, or host:port.")
    parser.add_argument(
        "--wait",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Return when it is drained (the default), or as soon as routers know.",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="Longest wait; then exit with 1 (default: 600). It drains on.",
    )
    parser.add_argument(
        "--admin",
        action="append",
        metavar="URL",
        help=f"A router's admin API; several times for several routers (default: {DEFAULT_ADMIN}).",
    )
    parser.add_argument("--resume", action="store_true", help="Take it back: the engine serves.")
    return parser
