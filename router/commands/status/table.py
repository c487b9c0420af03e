"""A status as text for people: pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from router.commands.status.reading import EngineState, Status

GREEN, YELLOW, RED, BOLD, PLAIN = "\x1b[32m", "\x1b[33m", "\x1b[31m", "\x1b[1m", "\x1b[0m"
COLOURS = {"healthy": GREEN, "draining": YELLOW, "not probed": YELLOW, "unhealthy": RED}
Paint = Callable[[str, str], str]
# What became of a turn that need not be computed anew, all of it.
REUSED = ("hit", "cut", "decoder_alone")
HEAD = ("role", "engine", "state", "in flight", "holding KV")


def paint(text: str, colour: str) -> str:
    return f"{colour}{text}{PLAIN}"


def no_paint(text: str, colour: str) -> str:
    return text


def lines(
    status: Status, before: Status | None, seconds: float, painted: Paint = no_paint
) -> Iterator[str]:
    """`before`: what was seen that many `seconds` ago, for rates."""
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
        said = f"pair {pair.prefiller} -> {pair.decoder}: KV was not loaded, avoided for a while"
        yield painted(said, YELLOW)
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


def _summary(status: Status, before: Status | None, seconds: float) -> str:
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
    said = [f"{count} {name.replace('_', ' ')}" for name, count in counts.items() if count]
    return ", ".join(said) or "none yet"


def _hits(turns: Mapping[str, int]) -> str:
    """Of the turns after a first one, how many found what the last had left."""
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
