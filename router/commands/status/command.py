"""disagg-router status: a look at a router's engines, groups, load and conversations.

Exit code 0: it was seen. 1: it was not, and the line says why. 2: wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import httpx

from router.commands.arguments import Parser
from router.commands.output import unwritable
from router.commands.router_client import EndlessError, Remote, reason_of, with_scheme
from router.commands.status.reading import NotMetricsError, Status, read
from router.commands.status.table import lines, no_paint, paint

PROGRAM = "disagg-router status"
DEFAULT_URL = "http://127.0.0.1:8000"
DESCRIPTION = """\
Shows what a router sees: its engines and their state, what runs on them, requests and
conversations by outcome, and the time to the first byte. It reads the router's metrics, so it
needs no token, and with --workers it sees all of them.
"""
# Seconds for one look, and bytes of it.
PATIENCE = 5.0
LARGEST = 64 * 1024 * 1024
CLEAR = "\x1b[H\x1b[2J"


class StatusError(Exception):
    """One line for people."""


def main(
    argv: Sequence[str],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    url = _url(options.url)
    if url is None:
        parser.error(f"{options.url!r} is no router: give its URL, as in {DEFAULT_URL}")
    if not 0.1 <= options.interval <= 3600:
        parser.error("--interval: not a number of seconds from 0.1 to 3600")
    try:
        with Remote(PATIENCE, LARGEST) as router:
            look = partial(_look, router, f"{url}/metrics")
            if not options.watch:
                return _show(look(), options.json)
            return _watch(look, options, clock, sleep)
    except StatusError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except OSError as error:  # of a connection would be a StatusError
        return unwritable(PROGRAM, error)


def _show(status: Status, is_json: bool) -> int:
    if is_json:
        print(json.dumps(status.content()), flush=True)
    else:
        painted = paint if _has_colours() else no_paint
        print("\n".join(lines(status, None, 0, painted)), flush=True)
    return 0


def _watch(
    look: Callable[[], Status],
    options: argparse.Namespace,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> int:
    """A router that does not answer once may answer again: that is shown, and watched on."""
    painted = paint if _has_colours() else no_paint
    clear = CLEAR if _is_terminal() and not options.json else ""
    before, seen = None, clock()
    while True:
        moment = clock()
        try:
            status = look()
        except StatusError as error:
            said = json.dumps({"error": str(error)}) if options.json else str(error)
        else:
            said = json.dumps(status.content())
            if not options.json:
                said = "\n".join(lines(status, before, moment - seen, painted))
            before, seen = status, moment
        end = "\n" if clear or options.json else "\n\n"
        print(f"{clear}{said}", end=end, flush=True)
        sleep(max(0.0, options.interval - (clock() - moment)))


def _look(router: Remote, url: str) -> Status:
    """Raises StatusError."""
    try:
        said = router.ask("GET", url)
        if said.status != 200:
            raise StatusError(f"{url} answers {said.status}")
        return read(said.content.decode("utf-8", "replace"))
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:  # a host may be no name
        raise StatusError(f"no answer of {url}: {reason_of(error)}") from None
    except EndlessError as error:
        raise StatusError(str(error)) from None
    except NotMetricsError as error:
        raise StatusError(f"{url}: {error}") from None


def _url(text: str) -> str | None:
    """With a scheme and without what follows the address; None for what is no URL."""
    given = with_scheme(text)
    try:
        parsed = httpx.URL(given)
    except httpx.InvalidURL:
        return None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        return None
    return given.removesuffix("/metrics").rstrip("/")


def _is_terminal() -> bool:
    """There may be no output at all."""
    return sys.stdout is not None and sys.stdout.isatty()


def _has_colours() -> bool:
    return _is_terminal() and not os.environ.get("NO_COLOR")


def _parser() -> Parser:
    parser = Parser(
        prog=PROGRAM,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "url", nargs="?", default=DEFAULT_URL, metavar="URL", help=f"default: {DEFAULT_URL}"
    )
    parser.add_argument("--watch", action="store_true", help="Look again and again, until Ctrl-C.")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="of --watch (default: 1)"
    )
    parser.add_argument("--json", action="store_true", help="One JSON object for each look.")
    return parser
