"""disagg-router status: shows a router's engines, groups, load and conversations.

Exit code 0: shown. 1: not shown, and the error line has the reason. 2: wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import httpx

from router.commands.console import CommandParser, report_unwritable
from router.commands.router_client import (
    ANSWER_TIMEOUT_S,
    AnswerLimitError,
    RouterClient,
    one_line,
    with_scheme,
)
from router.commands.status.reading import EngineState, NotMetricsError, RouterStatus, parse_metrics

PROGRAM = "disagg-router status"
DEFAULT_URL = "http://127.0.0.1:8000"
DESCRIPTION = """\
Shows a router's engines and their state, requests in flight, requests and conversations by
outcome, and the time to the first byte. It reads the router's metrics, so it needs no token, and
with --workers it shows all workers.
"""
GREEN, YELLOW, RED, BOLD, PLAIN = "\x1b[32m", "\x1b[33m", "\x1b[31m", "\x1b[1m", "\x1b[0m"
COLOURS = {"healthy": GREEN, "draining": YELLOW, "not probed": YELLOW, "unhealthy": RED}
Paint = Callable[[str, str], str]
# Outcomes of turns whose KV was reused.
REUSED = ("hit", "cut", "decoder_alone")
HEAD = ("role", "engine", "state", "in flight", "holding KV")

CLEAR_SCREEN = "\x1b[H\x1b[2J"


class StatusError(Exception):
    """The status cannot be shown; the message is one line."""


def main(
    argv: Sequence[str],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    url = _url(options.url)
    if url is None:
        parser.error(f"{options.url!r} is not a router: give its URL, as in {DEFAULT_URL}")
    if not 0.1 <= options.interval <= 3600:
        parser.error("--interval: not a number of seconds from 0.1 to 3600")
    try:
        with RouterClient(ANSWER_TIMEOUT_S) as router:
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
        return report_unwritable(PROGRAM, error)


def _show(status: RouterStatus, is_json: bool) -> int:
    if is_json:
        print(json.dumps(status.content()), flush=True)
    else:
        painted = paint if _has_colours() else no_paint
        print("\n".join(lines(status, None, 0, painted)), flush=True)
    return 0


def _watch(
    look: Callable[[], RouterStatus],
    options: argparse.Namespace,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> int:
    """Show the status again and again. A router that does not answer may answer again."""
    painted = paint if _has_colours() else no_paint
    clear = CLEAR_SCREEN if _is_terminal() and not options.json else ""
    before, seen = None, clock()
    while True:
        moment = clock()
        try:
            status = look()
        except StatusError as error:
            text = json.dumps({"error": str(error)}) if options.json else str(error)
        else:
            text = json.dumps(status.content())
            if not options.json:
                text = "\n".join(lines(status, before, moment - seen, painted))
            before, seen = status, moment
        end = "\n" if clear or options.json else "\n\n"
        print(f"{clear}{text}", end=end, flush=True)
        sleep(max(0.0, options.interval - (clock() - moment)))


def _look(router: RouterClient, url: str) -> RouterStatus:
    """Raises StatusError."""
    try:
        answer = router.request("GET", url)
        if answer.status != 200:
            raise StatusError(f"{url} answers {answer.status}")
        return parse_metrics(answer.content.decode("utf-8", "replace"))
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:  # a host may be no name
        raise StatusError(f"no answer from {url}: {one_line(error)}") from None
    except AnswerLimitError as error:
        raise StatusError(str(error)) from None
    except NotMetricsError as error:
        raise StatusError(f"{url}: {error}") from None


def paint(text: str, colour: str) -> str:
    return f"{colour}{text}{PLAIN}"


def no_paint(text: str, colour: str) -> str:
    return text


def lines(
    status: RouterStatus, before: RouterStatus | None, seconds: float, painted: Paint = no_paint
) -> Iterator[str]:
    """Yield the lines for a person. `before` is the status `seconds` ago, for rates."""
    yield painted(_summary(status, before, seconds), BOLD)
    yield ""
    yield from _engines(status.engines, painted)
    if sharing := [one.name for one in status.engines if one.shares_id]:
        yield painted(
            f"{', '.join(sharing)}: one engine_id at several engines, so no KV moves between "
            "these; give each an engine_id of its own",
            RED,
        )
    for group in status.groups:
        if len(status.groups) > 1 or not (group.prefillers and group.decoders):
            half = "" if group.prefillers and group.decoders else "  (half a group: gets nothing)"
            yield (
                f"group {group.name}: weight {group.weight:g}, {group.prefillers} prefillers, "
                f"{group.decoders} decoders{half}"
            )
    for pair in status.avoided_pairs:
        text = f"pair {pair.prefiller} -> {pair.decoder}: KV was not loaded, avoided for a while"
        yield painted(text, YELLOW)
    for source in status.sources:
        if source.trouble:
            yield painted(f"source {source.name} is in trouble: see the log, or /ready", YELLOW)
    yield ""
    yield f"requests       {_counts(status.requests)}"
    if status.turns:
        yield f"conversations  {_counts(status.turns)}{_hits(status.turns)}"
    if any(status.refusals.values()):
        yield painted(f"refused        {_counts(status.refusals)}", YELLOW)
    yield f"first byte     {_times(status.first_byte)}"


def _summary(status: RouterStatus, before: RouterStatus | None, seconds: float) -> str:
    parts = [f"{status.in_flight} requests in flight", f"{status.queued} waiting"]
    parts.append(f"{status.connections} connections")
    if status.workers > 1:
        parts.append(f"{status.workers} workers")
    if before is not None and seconds > 0:
        ended = sum(status.requests.values()) - sum(before.requests.values())
        parts.append(f"{max(0, ended) / seconds:.1f} requests/s")
    return ", ".join(parts)


def _engines(engines: Sequence[EngineState], painted: Paint) -> Iterator[str]:
    if not engines:
        yield painted("no engines", RED)
        return
    rows = [
        (one.role, one.name, _state(one), str(one.in_flight), str(one.holding)) for one in engines
    ]
    widths = [max(map(len, column)) for column in zip(HEAD, *rows, strict=True)]
    yield _row(HEAD, widths, no_paint)
    for row in rows:
        yield _row(row, widths, painted)


def _row(row: Sequence[str], widths: Sequence[int], painted: Paint) -> str:
    cells = [
        cell.rjust(width) if cell.isdigit() or place > 2 else cell.ljust(width)
        for place, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    cells[2] = painted(cells[2], COLOURS.get(row[2], PLAIN))
    return "  ".join(cells).rstrip()


def _state(engine: EngineState) -> str:
    return "draining" if engine.draining and engine.health == "healthy" else engine.health


def _counts(counts: Mapping[str, int]) -> str:
    parts = [f"{count} {name.replace('_', ' ')}" for name, count in counts.items() if count]
    return ", ".join(parts) or "none yet"


def _hits(turns: Mapping[str, int]) -> str:
    """Return the share of next turns that reused the last turn's KV."""
    again = sum(turns.values()) - turns.get("new", 0)
    reused = sum(turns.get(outcome, 0) for outcome in REUSED)
    return f" ({reused / again:.0%} of next turns reuse)" if again else ""


def _times(quantiles: Mapping[str, float | None]) -> str:
    if all(seconds is None for seconds in quantiles.values()):
        return "nothing answered yet"
    return ", ".join(
        f"{name} {'?' if seconds is None else _time(seconds)}"
        for name, seconds in quantiles.items()
    )


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _url(text: str) -> str | None:
    """Return the URL with a scheme and without a path, or None if it is no URL."""
    given = with_scheme(text)
    try:
        parsed = httpx.URL(given)
    except httpx.InvalidURL:
        return None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        return None
    return given.removesuffix("/metrics").rstrip("/")


def _is_terminal() -> bool:
    """Return False if there is no standard output."""
    return sys.stdout is not None and sys.stdout.isatty()


def _has_colours() -> bool:
    return _is_terminal() and not os.environ.get("NO_COLOR")


def _parser() -> CommandParser:
    parser = CommandParser(PROGRAM, DESCRIPTION)
    parser.add_argument(
        "url", nargs="?", default=DEFAULT_URL, metavar="URL", help=f"default: {DEFAULT_URL}"
    )
    parser.add_argument("--watch", action="store_true", help="Look again and again, until Ctrl-C.")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="of --watch (default: 1)"
    )
    parser.add_argument("--json", action="store_true", help="One JSON object for each look.")
    return parser
