"""disagg-router status: shows a router's engines, groups, load and conversations.

`parse_metrics` reads the router's metrics into a `RouterStatus`, and `lines` shows it to a person.
Exit code 0: shown. 1: not shown, and the error line has the reason. 2: wrong usage.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from router.commands.console import (
    BOLD,
    GREEN,
    PLAIN,
    RED,
    YELLOW,
    CommandError,
    CommandParser,
    Paint,
    no_paint,
    number_in,
    paint_for,
    time_text,
)
from router.commands.router_client import ask_router, router_url
from router.fleet.pair_rates import PairRate, SlowPair, pair_name, rate_text

DESCRIPTION = """\
Shows a router's engines and their state, requests in flight, requests, conversations and prefix
loans by outcome, and the time to the first byte. It reads the router's metrics, so it needs no
token, and with --workers it shows all workers.
"""
PREFIX = "disagg_router_"
# Every router has this metric.
REQUIRED_METRIC = "requests_in_flight"
HEALTH = {1: "healthy", 0: "unhealthy", -1: "not probed"}
COLOURS = {
    "healthy": GREEN,
    "draining": YELLOW,
    "degraded": YELLOW,
    "not probed": YELLOW,
    "unhealthy": RED,
}
# Outcomes of turns whose KV was reused.
REUSED = ("hit", "cut", "decoder_alone")
HEAD = ("role", "engine", "state", "in flight", "KV leases")
# Fewer engines than this are needed for nothing.
LEAST_NEED = 0.001
CLEAR_SCREEN = "\x1b[H\x1b[2J"


class NotMetricsError(ValueError):
    """The text is not a router's metrics; the message is one line."""


def main(
    argv: Sequence[str],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    parser = CommandParser("disagg-router status", DESCRIPTION)
    add = parser.add_argument
    parser.add_router_url()
    add("--watch", action="store_true", help="Repeat until Ctrl-C.")
    pause = "Pause of --watch (default: 1 s)."
    add(
        "--interval",
        type=number_in(0.1, 3600, unit="s"),
        default=1.0,
        metavar="SECONDS",
        help=pause,
    )
    add("--json", action="store_true", help="Print a JSON object each time.")
    options = parser.parse_args(argv)
    return parser.run(lambda: _run(options, clock, sleep))


def _run(
    options: argparse.Namespace, clock: Callable[[], float], sleep: Callable[[float], None]
) -> int:
    """Show the status, with --watch again and again: a router may answer again."""
    url = f"{router_url(options.url).removesuffix('/metrics').rstrip('/')}/metrics"
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    painted = paint_for(sys.stdout)
    clear = CLEAR_SCREEN if is_terminal and options.watch and not options.json else ""
    end = "\n" if clear or options.json or not options.watch else "\n\n"
    before, seen = None, clock()
    while True:
        moment = clock()
        try:
            status = _look(url)
        except CommandError as error:
            if not options.watch:
                raise
            text = json.dumps({"error": str(error)}) if options.json else str(error)
        else:
            text = json.dumps(asdict(status))
            if not options.json:
                text = "\n".join(lines(status, before, moment - seen, painted))
            before, seen = status, moment
        print(f"{clear}{text}", end=end, flush=True)
        if not options.watch:
            return 0
        sleep(max(0.0, options.interval - (clock() - moment)))


def _look(url: str) -> RouterStatus:
    answer = ask_router("GET", url)
    if answer.status_code != 200:
        raise CommandError(f"{url} answers {answer.status_code}")
    try:
        return parse_metrics(answer.content.decode("utf-8", "replace"))
    except NotMetricsError as error:
        raise CommandError(f"{url}: {error}") from None


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One engine.

    `in_flight` counts legs, `holding` KV leases: requests whose KV waits there for a decode engine.
    `shares_id` means that another engine has the same engine_id. `degraded` is the reason why no
    KV moves to or from a healthy engine. `prefers` has the legs that an engine of both roles gets
    now, several if worker processes differ.
    """

    name: str
    role: str
    health: str
    draining: bool
    in_flight: int
    holding: int
    shares_id: bool = False
    degraded: str = ""
    prefers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupState:
    """One group. `preferred` counts its engines of both roles by the legs that they get now, and
    `form_reasons` are the reasons why they work by cost or not. `needed` is the number of engines
    that this router's requests need, by role if known."""

    name: str
    weight: float
    prefillers: int
    decoders: int
    preferred: Mapping[str, int] = field(default_factory=dict)
    needed: Mapping[str, float] = field(default_factory=dict)
    form_reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceState:
    name: str
    engines: int
    trouble: bool


@dataclass(frozen=True, slots=True)
class AvoidedPair:
    """Two engines that could not exchange KV and are paired with others for a while."""

    prefiller: str
    decoder: str


@dataclass(frozen=True, slots=True)
class PairStatus:
    """The rate at which KV moves from one engine to another. `source` is empty where a stock engine
    does not name it. `slowness` is how many times as fast its neighbours are, 0 if it is not slow.
    """

    source: str
    target: str
    bytes_per_second: float
    transfer_seconds: float
    slowness: float = 0.0

    @property
    def name(self) -> str:
        return pair_name((self.source, self.target))

    def describe(self) -> str:
        """Say how slow the pair is."""
        rate = PairRate(self.bytes_per_second, self.transfer_seconds)
        slow = SlowPair(rate, self.slowness * self.bytes_per_second)
        return slow.describe((self.source, self.target))


@dataclass(frozen=True, slots=True)
class RouterStatus:
    """A router's fleet and load; counts are since its start.

    `first_byte` has percentiles in seconds of the last answers of each worker, {} without answers;
    `recent_answers` is how many answers that are.
    """

    workers: int
    in_flight: int
    queued: int
    connections: int
    engines: tuple[EngineStatus, ...]
    groups: tuple[GroupState, ...]
    sources: tuple[SourceState, ...]
    avoided_pairs: tuple[AvoidedPair, ...]
    pairs: tuple[PairStatus, ...]
    """The pairs of engines of which a rate is known, slowest first."""
    requests: Mapping[str, int]
    canary: Mapping[str, int]
    refusals: Mapping[str, int]
    turns: Mapping[str, int]
    loans: Mapping[str, int]
    borrowed_tokens: int
    first_byte: Mapping[str, float]
    recent_answers: int
    prefill_rates: Mapping[str, float]
    """Prompt tokens per second, by engine."""


def parse_metrics(text: str) -> RouterStatus:
    """Raises NotMetricsError."""
    found = Samples(text)
    if REQUIRED_METRIC not in found.by_name:
        raise NotMetricsError("the answer has no metrics of a disagg-router")
    trouble = found.sums("source_trouble", "source")
    return RouterStatus(
        workers=found.total("workers"),
        in_flight=found.total(REQUIRED_METRIC),
        queued=found.total("queue_depth"),
        connections=found.total("client_connections"),
        engines=tuple(
            sorted(_engines_in(found), key=lambda one: (one.role != "prefill", one.role, one.name))
        ),
        groups=tuple(_groups_in(found)),
        sources=tuple(
            SourceState(name, round(count), bool(trouble[(name,)]))
            for (name,), count in found.sums("source_engines", "source").items()
        ),
        avoided_pairs=tuple(
            AvoidedPair(*pair)
            for pair, value in found.sums("pair_avoided", "prefiller", "decoder").items()
            if value
        ),
        pairs=tuple(sorted(_pairs_in(found), key=lambda one: one.bytes_per_second)),
        requests=found.counts("requests_total", "outcome"),
        canary=found.counts("kv_canary_total", "outcome"),
        refusals=found.counts("refusals_total", "reason"),
        turns=found.counts("conversation_turns_total", "outcome"),
        loans=found.counts("prefix_loans_total", "outcome"),
        borrowed_tokens=found.total("prefix_loan_tokens_total"),
        first_byte=found.values("recent_time_to_first_byte_seconds", "percentile"),
        recent_answers=found.total("recent_answers"),
        prefill_rates=found.values("engine_prefill_tokens_per_second", "engine"),
    )


class Samples:
    """The finite samples of a router's metrics, by name without the prefix."""

    def __init__(self, text: str) -> None:
        """Raises NotMetricsError."""
        self.by_name: dict[str, list[Sample]] = defaultdict(list)
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name.startswith(PREFIX) and isfinite(sample.value):
                        self.by_name[sample.name.removeprefix(PREFIX)].append(sample)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            text = f"the answer is not in Prometheus' text format: {error}"
            raise NotMetricsError(text) from None

    def sums(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Return a metric's values by these labels, added over all others."""
        found: dict[tuple[str, ...], float] = defaultdict(float)
        for sample in self.by_name.get(name, ()):
            found[tuple(sample.labels.get(label, "") for label in labels)] += sample.value
        return found

    def total(self, name: str) -> int:
        return round(self.sums(name)[()])

    def values(self, name: str, label: str) -> dict[str, float]:
        return {key: value for (key,), value in self.sums(name, label).items()}

    def counts(self, name: str, label: str) -> dict[str, int]:
        return {key: round(value) for key, value in sorted(self.values(name, label).items())}


def _engines_in(found: Samples) -> Iterator[EngineStatus]:
    running, holding, draining, sharing = (
        found.sums(f"engine_{name}", "role", "engine")
        for name in ("requests_in_flight", "holding", "draining", "shares_id")
    )
    degraded = {
        (role, name): reason
        for role, name, reason in found.sums("engine_degraded", "role", "engine", "reason")
    }
    preferred: dict[str, list[str]] = defaultdict(list)
    for name, legs in found.sums("engine_preferred_role", "engine", "preferred"):
        preferred[name].append(legs)
    for (role, name), health in found.sums("engine_healthy", "role", "engine").items():
        yield EngineStatus(
            name,
            role,
            HEALTH.get(round(health), "unknown"),
            bool(draining[role, name]),
            round(running[role, name]),
            round(holding[role, name]),
            bool(sharing[role, name]),
            degraded.get((role, name), ""),
            tuple(preferred.get(name, ())),
        )


def _pairs_in(found: Samples) -> Iterator[PairStatus]:
    seconds, slowness = (
        found.sums(f"pair_{name}", "source", "target") for name in ("transfer_seconds", "slowness")
    )
    for pair, rate in found.sums("pair_bytes_per_second", "source", "target").items():
        source, target = pair
        yield PairStatus(source, target, rate, seconds[pair], slowness[pair])


def _groups_in(found: Samples) -> Iterator[GroupState]:
    preferred: dict[str, Counter[str]] = defaultdict(Counter)
    for group, _, legs in found.sums("engine_preferred_role", "group", "engine", "preferred"):
        preferred[group][legs] += 1
    needed: dict[str, dict[str, float]] = defaultdict(dict)
    for (group, role), number in found.sums("engines_needed", "group", "role").items():
        needed[group][role] = number
    reasons = found.sums("engine_preferred_role", "group", "reason")
    sizes = found.sums("group_engines", "group", "role")
    for name, weight in found.values("group_weight", "group").items():
        yield GroupState(
            name,
            weight,
            round(sizes[name, "prefill"]),
            round(sizes[name, "decode"]),
            dict(preferred[name]),
            needed[name],
            tuple(reason for group, reason in reasons if group == name and reason),
        )


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
    for one in status.engines:
        if one.degraded and not one.shares_id:
            who = "engine" if one.role == "both" else f"{one.role} engine"
            yield painted(f"{who} {one.name} moves no KV: {one.degraded}", YELLOW)
    for group in status.groups:
        is_whole = group.prefillers and group.decoders
        if len(status.groups) > 1 or not is_whole:
            half = "" if is_whole else " (incomplete: used only if no group is complete)"
            yield (
                f"group {group.name}: weight {group.weight:g}, prefill engines: "
                f"{group.prefillers}, decode engines: {group.decoders}{half}"
            )
        if group.preferred:
            yield f"group {group.name}: {_division(group)}"
        # Of an idle group with fixed roles, the line would say nothing.
        is_needed = any(number >= LEAST_NEED for number in group.needed.values())
        if group.needed and (group.preferred or is_needed):
            needs = (f"{role} {_need(group.needed[role])}" for role in sorted(group.needed)[::-1])
            yield f"group {group.name}: engines needed: {', '.join(needs)}"
    for pair in status.avoided_pairs:
        text = f"pair {pair.prefiller} -> {pair.decoder}: no KV exchanged, or wrong KV; avoided "
        text += "for a while"
        yield painted(text, YELLOW)
    for known in status.pairs:
        if known.slowness:
            yield painted(known.describe(), YELLOW)
    for source in status.sources:
        if source.trouble:
            yield painted(
                f"source {source.name} returns no complete list: see the log, or /ready", YELLOW
            )
    yield ""
    yield f"requests       {_counts(status.requests)}"
    if status.turns:
        yield f"conversations  {_counts(status.turns)}{_hits(status.turns)}"
    if any(status.canary.values()):
        color = YELLOW if status.canary.get("disagreed") else ""
        text = f"KV canary      {_counts(status.canary)}"
        yield painted(text, color) if color else text
    if status.loans:
        yield f"prefix loans   {_counts(status.loans)} ({status.borrowed_tokens:,} tokens borrowed)"
    if any(status.refusals.values()):
        yield painted(f"refused        {_counts(status.refusals)}", YELLOW)
    yield f"first byte     {_times(status)}"
    if status.pairs:
        slowest, fastest = status.pairs[0], status.pairs[-1]
        several = dict.fromkeys((slowest, fastest))
        shown = " to ".join(f"{rate_text(e.bytes_per_second)} ({e.name})" for e in several)
        yield f"KV transfers   {shown}"
    if rates := sorted((rate, name) for name, rate in status.prefill_rates.items()):
        ends = dict.fromkeys((rates[0], rates[-1]))
        shown = " to ".join(f"{rate:,.0f} ({name})" for rate, name in ends)
        yield f"prefill rate   {shown} tokens/s"


def _summary(status: RouterStatus, before: RouterStatus | None, seconds: float) -> str:
    parts = [f"{_plural(status.in_flight, 'request')} in flight", f"{status.queued} waiting"]
    parts.append(_plural(status.connections, "connection"))
    if status.workers > 1:
        parts.append(f"{status.workers} workers")
    if before is not None and seconds > 0:
        ended = sum(status.requests.values()) - sum(before.requests.values())
        parts.append(f"{max(0, ended) / seconds:.1f} requests/s")
    return ", ".join(parts)


def _engines(engines: Sequence[EngineStatus], painted: Paint) -> Iterator[str]:
    if not engines:
        yield painted("no engines", RED)
        return
    rows = [
        (_role(one), one.name, _state(one), str(one.in_flight), str(one.holding)) for one in engines
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


def _role(engine: EngineStatus) -> str:
    now = " or ".join("by cost" if legs == "both" else f"now {legs}" for legs in engine.prefers)
    return f"{engine.role}, {now}" if now else engine.role


def _division(group: GroupState) -> str:
    """Return what the group's engines of both roles do now, and why."""
    counts = sorted(group.preferred.items(), reverse=True)
    parts = [f"{count} {'by cost' if legs == 'both' else legs}" for legs, count in counts]
    form = "" if "both" in group.preferred else "; boundary"
    why = f"{form}, since {' or '.join(group.form_reasons)}" if group.form_reasons else ""
    return f"engines of both roles: {', '.join(parts)}{why}"


def _need(engines: float) -> str:
    """Return a number of engines. Little load is not shown as none."""
    return "<0.1" if LEAST_NEED <= engines < 0.05 else f"{engines:.1f}"


def _state(engine: EngineStatus) -> str:
    if engine.health != "healthy":
        return engine.health
    if engine.draining:
        return "draining"
    return "degraded" if engine.degraded else engine.health


def _counts(counts: Mapping[str, int]) -> str:
    parts = [f"{count} {name.replace('_', ' ')}" for name, count in counts.items() if count]
    return ", ".join(parts) or "none yet"


def _hits(turns: Mapping[str, int]) -> str:
    """Return the share of next turns that reused the last turn's KV."""
    again = sum(turns.values()) - turns.get("new", 0)
    reused = sum(turns.get(outcome, 0) for outcome in REUSED)
    return f" ({reused / again:.0%} of next turns reuse KV)" if again else ""


def _times(status: RouterStatus) -> str:
    if not status.first_byte:
        return "nothing answered yet"
    times = [f"{name} {time_text(seconds)}" for name, seconds in status.first_byte.items()]
    return f"{', '.join(times)} ({_plural(status.recent_answers, 'last answer')})"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
