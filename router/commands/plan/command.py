"""disagg-router plan: how many prefill and decode engines a trace needs for its goals.

Exit code 0: printed. 1: no number of engines is enough, or an engine cannot be read. 2: wrong
usage, or a file that cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from router.commands.console import CommandError, CommandParser, UsageError, number_in
from router.commands.plan.estimate import (
    Decoded,
    EngineCosts,
    EnginesNeeded,
    Prefilled,
    decode,
    needs,
    prefill,
)
from router.commands.plan.trace import TracedRequest, read_trace
from router.commands.router_client import ask_router, http_url, with_scheme
from router.fleet.capabilities import EngineCapabilities
from router.fleet.kv_facts import IDENTITY_PATH
from router.fleet.step_model import StepModel
from router.openai.answers import parse_object

MAX_ENGINES = 1024
# More prefill engines than the least number, which may need fewer decode engines.
MORE_PREFILLERS = 2
CHART_PARTS = 48
BARS = "▁▂▃▄▅▆▇█"
DESCRIPTION = f"""\
Reads the requests of a trace (Mooncake's JSON lines: timestamp, input_length, output_length,
hash_ids) or of the router's access log (--log-format json), and prints the smallest number of
prefill and decode engines that meets the goals, and the goodput of others. It is an estimate: see
docs/sizing.md for how far it is off.

The costs are those that an engine with our connector has measured (--engine, {IDENTITY_PATH}), or
the options below; the options take precedence.
"""
# Options with a number: the smallest and the largest one, and the help text.
COSTS = {
    "prefill-tokens-per-second": (1e-3, 1e9, "Prompt tokens that an engine computes per second"),
    "decode-step-ms": (1e-3, 1e6, "Time of a step with few running answers"),
    "token-context-ns": (0, 1e6, "More for each prompt token and token before it"),
    "context-ns": (0, 1e6, "More for each token of context of running answers"),
    "kv-tokens": (1, 1e12, "Tokens of KV in an engine's accelerator"),
    "max-num-seqs": (1, 1e6, "Requests that an engine runs at once (256)"),
    "cache-tokens": (0, 1e12, "Tokens of a prefix cache (default: --kv-tokens)"),
    "transfer-tokens-per-second": (1, 1e12, "Tokens whose KV moves per second (300000)"),
}


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("disagg-router plan", DESCRIPTION)
    add = parser.add_argument
    add("trace", type=Path, metavar="FILE", help="A trace, or an access log.")
    add("--engine", metavar="URL", help="An engine whose measured costs count.")
    for name, (least, most, text) in COSTS.items():
        add(f"--{name}", type=number_in(least, most), metavar="X", help=f"{text}.")
    positive, share = number_in(1e-3, 1e6, unit="s"), number_in(0.01, 1)
    add("--ttft", type=positive, default=2.0, metavar="SECONDS", help="Goal (2 s).")
    text = "Goal of each request's mean time between tokens (0.05 s)."
    add("--itl", type=positive, default=0.05, metavar="SECONDS", help=text)
    text = "Share of requests that is within both goals (0.9)."
    add("--goodput", type=share, default=0.9, metavar="X", help=text)
    add("--load", type=number_in(0.01, 1000), default=1.0, metavar="X", help="Times as fast (1).")
    add("--json", action="store_true", help="Print one JSON object.")
    options = parser.parse_args(argv)
    return parser.run(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    costs = _costs(options)
    found, left_out = read_trace(options.trace)
    requests = [one._replace(at=one.at / options.load) for one in found]
    plan = FleetPlan(requests, costs, options.ttft, options.itl)
    prefillers, decoders = plan.smallest(options.goodput)
    if options.json:
        print(json.dumps({**plan.content(prefillers, decoders), "left_out": left_out}))
    else:
        print("\n".join(plan.page(options.trace.name, options.goodput, prefillers, decoders)))
    if left_out:
        total = left_out + len(found)
        text = f"{left_out} of {total} requests are left out: the log has no counts of their tokens"
        hint = f"If they are like the others, use --load {total / len(found):.2g}"
        print(f"{text}. {hint}", file=sys.stderr)
    sys.stdout.flush()
    return 0


def _costs(options: argparse.Namespace) -> EngineCosts:
    """Return the costs of an engine. Raises UsageError and CommandError."""
    known = EngineCapabilities() if options.engine is None else _capabilities(options.engine)
    model, rate = known.step_model, options.prefill_tokens_per_second
    if model is None and None in (rate, options.decode_step_ms):
        raise UsageError(
            "give the costs: --engine URL, or --prefill-tokens-per-second and --decode-step-ms"
        )
    model = model or StepModel(1.0, 1.0, 0.0, 0.0)
    given = {
        "base": _scaled(options.decode_step_ms, 1e-3),
        "token": None if rate is None else 1 / rate,
        "token_context": _scaled(options.token_context_ns, 1e-9),
        "context": _scaled(options.context_ns, 1e-9),
    }
    model = replace(model, **{key: value for key, value in given.items() if value is not None})
    kv_tokens = options.kv_tokens or known.cache_tokens
    if not kv_tokens:
        raise UsageError("give --kv-tokens: the tokens that an engine's KV cache holds")
    cache = options.cache_tokens
    return EngineCosts(
        model,
        known.max_step_tokens or 8192,
        int(kv_tokens),
        int(kv_tokens if cache is None else cache),
        int(options.max_num_seqs or known.max_num_seqs or 256),
        options.transfer_tokens_per_second or 300_000.0,
    )


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit


def _capabilities(given: str) -> EngineCapabilities:
    """Return what an engine's identity page has. Raises UsageError and CommandError."""
    url = with_scheme(given).rstrip("/")
    if http_url(url) is None:
        raise UsageError(f"{given!r} is not an engine: give its URL")
    answer = ask_router("GET", f"{url}{IDENTITY_PATH}")
    if answer.status_code != 200:
        raise CommandError(f"{url} has no {IDENTITY_PATH}: give an engine with our connector")
    found = EngineCapabilities()
    found.note_identity(parse_object(answer.content) or {})
    if found.step_model is None:
        text = "has measured no costs yet: a decode engine, or one of both roles, learns them by"
        raise CommandError(f"{url} {text} prompts and answers. Options give them, too")
    return found


@dataclass(slots=True)
class FleetPlan:
    """The estimates for one trace; `ttft` and `itl` are the goals in seconds."""

    requests: Sequence[TracedRequest]
    costs: EngineCosts
    ttft: float
    itl: float
    _prefilled: dict[int, Prefilled] = field(default_factory=dict)
    _decoded: dict[tuple[int, int], Decoded] = field(default_factory=dict)

    def prefilled(self, prefillers: int) -> Prefilled:
        if prefillers not in self._prefilled:
            self._prefilled[prefillers] = prefill(self.requests, prefillers, self.costs)
        return self._prefilled[prefillers]

    def decoded(self, prefillers: int, decoders: int) -> Decoded:
        key = prefillers, decoders
        if key not in self._decoded:
            self._decoded[key] = decode(self.prefilled(prefillers), decoders, self.costs)
        return self._decoded[key]

    def goodput(self, prefillers: int, decoders: int) -> float:
        found = self.decoded(prefillers, decoders).latencies
        return sum(one.ttft <= self.ttft and one.itl <= self.itl for one in found) / len(found)

    def smallest(self, goal: float) -> tuple[int, int]:
        """Return the smallest number of engines, prefill and decode, whose goodput is the goal.
        Raises CommandError."""
        if (best := self.goodput(MAX_ENGINES, MAX_ENGINES)) < goal:
            text = f"no number of engines reaches a goodput of {goal:g}: at most {best:.3f}"
            raise CommandError(f"{text}, because of requests that alone take longer than a goal")
        least = _least(lambda number: self.goodput(number, MAX_ENGINES) >= goal)
        some = range(least, min(least + MORE_PREFILLERS, MAX_ENGINES) + 1)
        return min(((p, self._least_decoders(p, goal)) for p in some), key=sum)

    def _least_decoders(self, prefillers: int, goal: float) -> int:
        return _least(lambda number: self.goodput(prefillers, number) >= goal)

    def needs(self, prefillers: int, decoders: int) -> list[EnginesNeeded]:
        parts = self.prefilled(prefillers), self.decoded(prefillers, decoders)
        return needs(self.requests, *parts, self.costs, self.itl, CHART_PARTS)

    def content(self, prefillers: int, decoders: int) -> Mapping[str, Any]:
        found = self.needs(prefillers, decoders)
        return {
            "prefill_engines": prefillers,
            "decode_engines": decoders,
            "goodput": self.goodput(prefillers, decoders),
            "table": [
                {"prefill": p, "decode": d, "goodput": self.goodput(p, d)}
                for p in _around(prefillers)
                for d in _around(decoders)
            ],
            "part_seconds": self.requests[-1].at / CHART_PARTS,
            "needed": [one._asdict() for one in found],
        }

    def page(self, name: str, goal: float, prefillers: int, decoders: int) -> Iterator[str]:
        requests, prefilled = self.requests, self.prefilled(prefillers)
        count, prompts = len(requests), sum(one.prompt for one in requests)
        cached = sum(one.cached for _, one in prefilled.ends) / prompts
        answers, minutes = sum(one.output for one in requests) / count, requests[-1].at / 60
        yield (
            f"{name}: {count:,} requests in {minutes:.1f} minutes, prompts of "
            f"{prompts / count:,.0f} tokens ({cached:.0%} cached), answers of {answers:,.0f}"
        )
        yield (
            f"smallest fleet with {goal:.0%} of the requests within TTFT {self.ttft:g} s and ITL "
            f"{self.itl * 1000:g} ms: {prefillers} prefill, {decoders} decode"
        )
        columns = _around(decoders)
        yield ""
        heads = "".join(f"{f'{d} D':>8}" for d in columns)
        yield f"goodput  {heads}  prefill busy"
        for p in _around(prefillers):
            goods = "".join(f"{self.goodput(p, d):>8.3f}" for d in columns)
            yield f"{p:>5} P  {goods}  {self.prefilled(p).busy:>12.0%}"
        used = "".join(f"{self.decoded(prefillers, d).used:>8.0%}" for d in columns)
        yield f"KV used  {used}"
        yield ""
        found = self.needs(prefillers, decoders)
        yield f"engines needed, each bar {minutes * 60 / CHART_PARTS:.0f} s"
        for role in ("prefill", "decode"):
            values = [float(getattr(one, role)) for one in found]
            top = max(values)
            bars = "".join(BARS[min(7, int(8 * value / (top or 1)))] for value in values)
            yield f"{role:<7}  {bars}  mean {sum(values) / len(values):.1f}, most {top:.1f}"


def _least(is_enough: Callable[[int], bool]) -> int:
    """Return the smallest number up to MAX_ENGINES that is enough. More are not less."""
    top = 1
    while top < MAX_ENGINES and not is_enough(top):
        top *= 2
    return bisect_left(range(top + 1), True, lo=top // 2 + 1 if top > 1 else 1, key=is_enough)


def _around(number: int) -> Sequence[int]:
    return range(max(1, number - 2), number + 3)
