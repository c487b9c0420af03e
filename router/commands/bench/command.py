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

from router.commands.bench.chats import ChatLoad, Figures, LoadPlan, Sample, Target
from router.commands.console import CommandParser, TerminalLine, UsageError
from router.commands.router_client import (
    API_KEY,
    first_model,
    http_url,
    key_headers,
    with_scheme,
)

DEFAULT_URL = "http://127.0.0.1:8000"
DESCRIPTION = f"""\
Sends chats to a router, several at a time, and prints percentiles of TTFT, ITL and end-to-end
latency, and the share of prompt tokens that were served from a cache. With --turns, each chat
continues from its answers. The variable {API_KEY} is the API key, if it is set.
"""
TERMINAL_PROGRESS_S, LOG_PROGRESS_S = 0.5, 5.0


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("disagg-router bench", DESCRIPTION)
    add = parser.add_argument
    add("url", nargs="?", default=DEFAULT_URL, metavar="URL", help=f"default: {DEFAULT_URL}")
    add(
        "--requests",
        type=_from(1, 1_000_000),
        default=100,
        metavar="N",
        help="Requests in all (100).",
    )
    add(
        "--concurrency", type=_from(1, 1024), default=8, metavar="N", help="Requests at a time (8)."
    )
    add("--turns", type=_from(1, 100), default=1, metavar="N", help="Turns of each chat (1).")
    add(
        "--words",
        type=_from(1, 100_000),
        default=100,
        metavar="N",
        help="Words of a question (100).",
    )
    add(
        "--tokens",
        type=_from(1, 100_000),
        default=32,
        metavar="N",
        help="Tokens of an answer (32).",
    )
    add("--model", type=_name, metavar="NAME", help="Default: the router's first model.")
    add(
        "--timeout",
        type=_seconds,
        default=120.0,
        metavar="SECONDS",
        help="Longest wait for an answer (120).",
    )
    add("--seed", type=int, default=1, metavar="N", help="Seed of the random words (1).")
    add("--json", action="store_true", help="Print one JSON object, not a table.")
    options = parser.parse_args(argv)
    return parser.run(lambda: _bench(options))


def _bench(options: argparse.Namespace) -> int:
    headers = key_headers(os.environ)
    target = _target(options.url, headers)
    model = options.model or first_model(_base(options.url), headers)
    plan = LoadPlan(
        model, options.requests, options.turns, options.words, options.tokens, options.seed
    )
    figures = Figures()
    load = ChatLoad(target, plan, options.timeout, figures)
    seconds = asyncio.run(_run(load, options, figures))
    report = json.dumps(figures.content(seconds)) if options.json else table(figures, seconds)
    print(report, flush=True)
    return 0 if figures.answered and not figures.failed else 1


async def _run(load: ChatLoad, options: argparse.Namespace, figures: Figures) -> float:
    """Return the seconds of the load. Progress goes to stderr: the figures may be piped."""
    started = time.monotonic()
    work = asyncio.create_task(load.run(options.concurrency, uuid4().hex[:8]))
    try:
        with TerminalLine(sys.stderr) as progress:
            interval = TERMINAL_PROGRESS_S if progress.is_terminal else LOG_PROGRESS_S
            while not work.done():
                await asyncio.wait((work,), timeout=interval)
                if progress.is_terminal or not work.done():
                    failed = f", {figures.failed} failed" if figures.failed else ""
                    ended = f"{figures.ended} of {options.requests} requests"
                    progress.show(f"{ended} after {time.monotonic() - started:.0f} s{failed}")
        await work
    finally:
        work.cancel()
    return max(time.monotonic() - started, 1e-9)


def _target(url: str, headers: Mapping[str, str]) -> Target:
    parsed = http_url(_base(url))
    if parsed is not None and parsed.scheme == "https":
        text = "bench does not support https; use the router's plain HTTP address"
        raise UsageError(f"{url}: {text}")
    if parsed is None or parsed.path.strip("/"):
        raise UsageError(f"{url!r} is not a router: give its address, as in {DEFAULT_URL}")
    return Target(parsed.host, parsed.port or 80, headers.get("authorization", ""))


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
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return value


def table(figures: Figures, seconds: float) -> str:
    """Return the report as text."""
    rows = [
        f"{figures.answered} answered, {figures.failed} failed in {seconds:.1f} s: "
        f"{figures.answered / seconds:.2f} requests/s, "
        f"{figures.completion_tokens / seconds:.1f} tokens/s",
        f"TTFT          {_times(figures.first)}",
        f"ITL           {_times(figures.gaps)}",
        f"end to end    {_times(figures.whole)}",
    ]
    if figures.prompt_tokens:
        share = figures.cached_tokens / figures.prompt_tokens
        rows.append(
            f"cached        {figures.cached_tokens} of {figures.prompt_tokens} prompt tokens "
            f"({share:.0%})"
        )
    rows += [f"{count} times: {problem}" for problem, count in figures.problems.most_common()]
    return "\n".join(rows)


def _times(sample: Sample) -> str:
    found = sample.quantiles()
    if found is None:
        return "-"
    return "  ".join(f"{name} {seconds * 1000:.1f} ms" for name, seconds in found.items())
