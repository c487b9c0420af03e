"""Parses a router's metrics into a `RouterStatus`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from math import inf, isfinite
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

PREFIX = "disagg_router_"
# Every router has this metric.
REQUIRED_METRIC = "requests_in_flight"
HEALTH = {1: "healthy", 0: "unhealthy", -1: "not probed"}
ROLES = ("prefill", "decode")
SHARES = (0.5, 0.9, 0.99)


class NotMetricsError(ValueError):
    """The text is not a router's metrics; the message is one line."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """One engine.

    `in_flight` counts legs, `holding` requests whose KV waits there for a decode engine.
    `shares_id` means that another engine has the same engine_id.
    """

    name: str
    role: str
    health: str
    draining: bool
    in_flight: int
    holding: int
    shares_id: bool = False


@dataclass(frozen=True, slots=True)
class GroupState:
    name: str
    weight: float
    prefillers: int
    decoders: int


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
class RouterStatus:
    """A router's fleet and load; counts are since its start.

    `first_byte` has quantiles in seconds, None without answers or beyond the last bucket.
    """

    workers: int
    in_flight: int
    queued: int
    connections: int
    engines: tuple[EngineState, ...]
    groups: tuple[GroupState, ...]
    sources: tuple[SourceState, ...]
    avoided_pairs: tuple[AvoidedPair, ...]
    requests: Mapping[str, int]
    refusals: Mapping[str, int]
    turns: Mapping[str, int]
    first_byte: Mapping[str, float | None]

    def content(self) -> dict[str, Any]:
        return asdict(self)


def parse_metrics(text: str) -> RouterStatus:
    """Raises NotMetricsError."""
    by_name = _samples(text)
    if REQUIRED_METRIC not in by_name:
        raise NotMetricsError("these are no metrics of a router")
    healths = by_name.get("engine_healthy", [])
    return RouterStatus(
        workers=_count(by_name, "workers"),
        in_flight=_count(by_name, REQUIRED_METRIC),
        queued=_count(by_name, "queue_depth"),
        connections=_count(by_name, "client_connections"),
        engines=tuple(sorted(_engines(healths, by_name), key=_in_order)),
        groups=tuple(_groups(by_name)),
        sources=tuple(_sources(by_name)),
        avoided_pairs=tuple(_avoided_pairs(by_name)),
        requests=_sums(by_name, "requests_total", "outcome"),
        refusals=_sums(by_name, "refusals_total", "reason"),
        turns=_sums(by_name, "conversation_turns_total", "outcome"),
        first_byte=_quantiles(by_name.get("time_to_first_byte_seconds_bucket", [])),
    )


def _samples(text: str) -> dict[str, list[Sample]]:
    """Return finite samples by name, without the prefix."""
    found: dict[str, list[Sample]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith(PREFIX) and isfinite(sample.value):
                    found.setdefault(sample.name.removeprefix(PREFIX), []).append(sample)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise NotMetricsError(f"not what metrics are written like: {error}") from None
    return found


def _count(by_name: Mapping[str, list[Sample]], name: str) -> int:
    return round(sum(sample.value for sample in by_name.get(name, ())))


def _engines(
    healths: Iterable[Sample], by_name: Mapping[str, list[Sample]]
) -> Iterator[EngineState]:
    def of(name: str) -> dict[tuple[str, str], int]:
        return {_role_and_name(sample): round(sample.value) for sample in by_name.get(name, ())}

    running, holding = of("engine_requests_in_flight"), of("engine_holding")
    draining, sharing = of("engine_draining"), of("engine_shares_id")
    for sample in healths:
        role, name = key = _role_and_name(sample)
        health = HEALTH.get(round(sample.value), "unknown")
        yield EngineState(
            name,
            role,
            health,
            bool(draining.get(key)),
            running.get(key, 0),
            holding.get(key, 0),
            bool(sharing.get(key)),
        )


def _role_and_name(sample: Sample) -> tuple[str, str]:
    return sample.labels.get("role", ""), sample.labels.get("engine", "")


def _in_order(engine: EngineState) -> tuple[bool, str, str]:
    return engine.role != ROLES[0], engine.role, engine.name


def _groups(by_name: Mapping[str, list[Sample]]) -> Iterator[GroupState]:
    engines = {
        (sample.labels.get("group", ""), sample.labels.get("role", "")): round(sample.value)
        for sample in by_name.get("group_engines", ())
    }
    for sample in by_name.get("group_weight", ()):
        name = sample.labels.get("group", "")
        prefillers, decoders = (engines.get((name, role), 0) for role in ROLES)
        yield GroupState(name, sample.value, prefillers, decoders)


def _sources(by_name: Mapping[str, list[Sample]]) -> Iterator[SourceState]:
    trouble = {
        sample.labels.get("source", ""): bool(sample.value)
        for sample in by_name.get("source_trouble", ())
    }
    for sample in by_name.get("source_engines", ()):
        name = sample.labels.get("source", "")
        yield SourceState(name, round(sample.value), trouble.get(name, False))


def _avoided_pairs(by_name: Mapping[str, list[Sample]]) -> Iterator[AvoidedPair]:
    for sample in by_name.get("pair_avoided", ()):
        if sample.value:
            yield AvoidedPair(sample.labels.get("prefiller", ""), sample.labels.get("decoder", ""))


def _sums(by_name: Mapping[str, list[Sample]], name: str, label: str) -> dict[str, int]:
    found: Counter[str] = Counter()
    for sample in by_name.get(name, ()):
        found[sample.labels.get(label, "")] += round(sample.value)
    return dict(sorted(found.items()))


def _quantiles(buckets: Iterable[Sample]) -> dict[str, float | None]:
    """Interpolate linearly within a bucket, as Prometheus' histogram_quantile does."""
    counts: Counter[float] = Counter()
    for sample in buckets:
        try:
            bound = float(sample.labels.get("le", ""))
        except ValueError:
            continue
        counts[bound] += round(sample.value)
    ordered = sorted(counts.items())
    return {f"p{share * 100:g}": _quantile(ordered, share) for share in SHARES}


def _quantile(ordered: list[tuple[float, int]], share: float) -> float | None:
    total = ordered[-1][1] if ordered else 0
    if not total:
        return None
    low, below = 0.0, 0
    for bound, count in ordered:
        if count >= share * total:
            inside = (share * total - below) / max(1, count - below)
            return None if bound == inf else low + (bound - low) * inside
        low, below = bound, count
    return None
