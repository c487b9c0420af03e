"""disagg-router bench: a bounded load on a router that runs, and what its clients saw.

Exit code 0: every request was answered. 1: some were not, or none could be asked. 2: wrong usage.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from uuid import uuid4

import httpx

from router.commands.bench.chats import LoadPlan
from router.commands.bench.figures import Figures, table
from router.commands.bench.load import ChatLoad, Target
from router.commands.console import CommandParser, report_unwritable
from router.commands.router_client import (
    ANSWER_TIMEOUT_S,
    AnswerLimitError,
    RouterClient,
    one_line,
    with_scheme,
)

PROGRAM = "disagg-router bench"
DEFAULT_URL = "http://127.0.0.1:8000"
KEY = "OPENAI_API_KEY"
DESCRIPTION = f"""\
Asks a router chats, several at a time, and prints percentiles of the time to the first token and
between tokens, and how many prompt tokens were reused. With --turns, each chat goes on from its
answers, as people's do. {KEY} is sent where it is set.
"""
MAX_MODELS_BYTES = 4 * 1024 * 1024
TERMINAL_PROGRESS_S, LOG_PROGRESS_S = 0.5, 5.0


class BenchError(Exception):
    """One line for people."""


def main(argv: Sequence[str], clock: Callable[[], float] = time.monotonic) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    target = _target(options.url, os.environ)
    if isinstance(target, str):
        parser.error(target)
    figures = Figures()
    try:
        model = options.model or _first_model(options.url, target)
        plan = LoadPlan(
            model, options.requests, options.turns, options.words, options.tokens, options.seed
        )
        load = ChatLoad(target, plan, options.timeout, figures)
        seconds = asyncio.run(_run(load, options, figures, clock))
        is_json = options.json
        said = json.dumps(figures.content(seconds)) if is_json else table(figures, seconds)
        print(said, flush=True)
    except BenchError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except OSError as error:  # of a connection would be counted
        return report_unwritable(PROGRAM, error)
    return 0 if figures.answered and not figures.failed else 1


async def _run(
    load: ChatLoad, options: argparse.Namespace, figures: Figures, clock: Callable[[], float]
) -> float:
    """The seconds that it took. Progress goes to stderr: the figures may be piped."""
    started = clock()
    is_terminal = sys.stderr.isatty()
    work = asyncio.create_task(load.run(options.concurrency, uuid4().hex[:8]))
    try:
        while not work.done():
            await asyncio.wait(
                (work,), timeout=TERMINAL_PROGRESS_S if is_terminal else LOG_PROGRESS_S
            )
            if is_terminal or not work.done():
                _say(figures, options.requests, clock() - started, is_terminal)
        await work
    finally:
        work.cancel()
        if is_terminal:
            print(file=sys.stderr)
    return max(clock() - started, 1e-9)


def _say(figures: Figures, requests: int, seconds: float, is_terminal: bool) -> None:
    failed = f", {figures.failed} failed" if figures.failed else ""
    line = f"{figures.ended} of {requests} requests after {seconds:.0f} s{failed}"
    start, end = ("\r", "") if is_terminal else ("", "\n")
    print(f"{start}{line}", end=end, file=sys.stderr, flush=True)


def _first_model(url: str, target: Target) -> str:
    """Raises BenchError."""
    headers = {"authorization": target.credential} if target.credential else {}
    try:
        with RouterClient(ANSWER_TIMEOUT_S, MAX_MODELS_BYTES, headers) as router:
            served = json.loads(router.request("GET", f"{_base(url)}/v1/models").content)["data"]
        return _name(str(served[0]["id"]))
    except (httpx.HTTPError, UnicodeError) as error:
        raise BenchError(f"no answer from {url}: {one_line(error)}") from None
    except AnswerLimitError as error:
        raise BenchError(str(error)) from None
    except (ValueError, LookupError, TypeError, RecursionError, argparse.ArgumentTypeError):
        raise BenchError(f"{url} names no model: give one with --model") from None


def _target(url: str, variables: Mapping[str, str]) -> Target | str:
    """Or what is wrong with it."""
    try:
        parsed = httpx.URL(_base(url))
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    if parsed.scheme == "https":
        return f"{url}: bench does not support https; use the router's plain HTTP address"
    if parsed.scheme != "http" or not parsed.host or parsed.path.strip("/"):
        return f"{url!r} is not a router: give its address, as in {DEFAULT_URL}"
    key = variables.get(KEY, "")
    if not (key.isascii() and (key.isprintable() or not key)):
        return f"{KEY} is not a key: ASCII without line breaks"
    return Target(parsed.host, parsed.port or 80, f"Bearer {key}" if key else "")


def _base(url: str) -> str:
    return with_scheme(url).rstrip("/")


def _from(least: int, most: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is not from {least} to {most}")
        return value

    return number


def _name(text: str) -> str:
    if not text.isprintable():
        raise argparse.ArgumentTypeError("no printable text")
    return text


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1e6:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")
    return value


def _parser() -> CommandParser:
    parser = CommandParser(PROGRAM, DESCRIPTION)
    add = parser.add_argument
    add("url", nargs="?", default=DEFAULT_URL, metavar="URL", help=f"default: {DEFAULT_URL}")
    add("--requests", type=_from(1, 1_000_000), default=100, metavar="N", help="In all (100).")
    add("--concurrency", type=_from(1, 1024), default=8, metavar="N", help="At a time (8).")
    add("--turns", type=_from(1, 100), default=1, metavar="N", help="Of each chat (1).")
    add("--words", type=_from(1, 100_000), default=100, metavar="N", help="A question (100).")
    add("--tokens", type=_from(1, 100_000), default=32, metavar="N", help="Of an answer (32).")
    add("--model", type=_name, metavar="NAME", help="The first that the router serves.")
    add("--timeout", type=_seconds, default=120.0, metavar="SECONDS", help="One answer (120).")
    add("--seed", type=int, default=1, metavar="N", help="Of the questions' words (1).")
    add("--json", action="store_true", help="One JSON object instead of the table.")
    return parser
