"""disagg-router bench: a bounded load on a router that runs, and what its clients saw.

Exit code 0: every request was answered. 1: some were not, or none could be asked. 2: wrong usage.
130: Ctrl-C, after the figures of the requests that had ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from uuid import uuid4

from router.commands.bench.chats import ChatLoad, Figures, LoadPlan, Sample, Target
from router.commands.console import (
    DEFAULT_URL,
    INTERRUPTED,
    CommandParser,
    UsageError,
    number_in,
    run_with_progress,
)
from router.commands.router_client import API_KEY, first_model, http_url, key_headers, router_url

DESCRIPTION = f"""\
Sends chats to a router, several at a time, and prints percentiles of TTFT, ITL and end-to-end
latency, and the share of prompt tokens that were served from a cache. With --turns, each chat
continues from its answers. Ctrl-C prints the figures so far. The variable {API_KEY} is the API
key, if it is set.
"""
# Options with a number: the largest one, the default, and the help text.
COUNTS = {
    "requests": (1_000_000, 100, "Requests in all"),
    "concurrency": (1024, 8, "Requests at a time"),
    "turns": (100, 1, "Turns of each chat"),
    "words": (100_000, 100, "Words of a question"),
    "tokens": (100_000, 32, "Tokens of an answer"),
}


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("disagg-router bench", DESCRIPTION)
    parser.add_router_url()
    add = parser.add_argument
    for name, (most, usual, text) in COUNTS.items():
        kind, shown = number_in(1, most, int), f"{text} ({usual})."
        add(f"--{name}", type=kind, default=usual, metavar="N", help=shown)
    add("--model", type=_name, metavar="NAME", help="Default: the router's first model.")
    text, seconds = "Longest wait for an answer (120 s).", number_in(0.001, 1e6, unit="s")
    add("--timeout", type=seconds, default=120.0, metavar="SECONDS", help=text)
    add("--seed", type=int, default=1, metavar="N", help="Seed of the random words (1).")
    add("--json", action="store_true", help="Print one JSON object, not a table.")
    options = parser.parse_args(argv)
    return parser.run(lambda: _bench(options))


def _bench(options: argparse.Namespace) -> int:
    headers = key_headers(os.environ)
    url = router_url(options.url)
    target = target_of(url, headers)
    model = options.model or first_model(url, headers)
    plan = LoadPlan(
        model, options.requests, options.turns, options.words, options.tokens, options.seed
    )
    figures, started = Figures(), time.monotonic()

    def progress() -> str:
        failed = f", {figures.failed} failed" if figures.failed else ""
        ended = f"{figures.ended} of {options.requests} requests"
        return f"{ended} after {time.monotonic() - started:.0f} s{failed}"

    load = ChatLoad(target, plan, options.timeout, figures)
    is_whole = True
    try:
        asyncio.run(run_with_progress(load.run(options.concurrency, uuid4().hex[:8]), progress))
    except KeyboardInterrupt:
        is_whole = False
    seconds = max(time.monotonic() - started, 1e-9)
    if options.json:
        report = json.dumps(figures.content(seconds) | {"interrupted": not is_whole})
    else:
        report = table(figures, seconds)
        if not is_whole:
            text = f"Interrupted: {options.requests - figures.ended} of {options.requests} requests"
            report = f"{text} had not ended.\n{report}"
    print(report, flush=True)
    if not is_whole:
        return INTERRUPTED
    return 0 if figures.answered and not figures.failed else 1


def target_of(url: str, headers: Mapping[str, str]) -> Target:
    """Return the router at `url` with the client's credential. Raises UsageError."""
    parsed = http_url(url)
    if parsed is not None and parsed.scheme == "https":
        text = "https is not supported here; use the router's plain HTTP address"
        raise UsageError(f"{url}: {text}")
    if parsed is None or parsed.path.strip("/"):
        raise UsageError(f"{url!r} is not a router: give its address, as in {DEFAULT_URL}")
    return Target(parsed.host, parsed.port or 80, headers.get("authorization", ""))


def _name(text: str) -> str:
    if not text.isprintable():
        raise argparse.ArgumentTypeError("no printable text")
    return text


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
