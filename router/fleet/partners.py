"""Which engines of a fleet can exchange KV, and why others cannot. Pure functions.

`find_difference` names the first fact in which two engines differ, and `compare_engines` makes a
`FleetReport` of a whole fleet. The running router and `disagg-router doctor` use both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from router.fleet.engine import BOTH, DECODE, LEGS, PREFILL, Engine, EngineRole
from router.fleet.kv_facts import (
    CONFIGURATION,
    NO_CONNECTOR,
    Difference,
    KvFacts,
    find_kv_difference,
    short_text,
)

MAX_NAMES = 3
# Kinds of engines of one role that are compared. Engines beyond count as fitting.
MAX_KINDS = 64
# Shown instead of a digest that an engine does not report.
NONE = "not reported"


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """One healthy engine of a fleet. `source_group` is the group that its source names, and
    `group` the one that it belongs to. `models` is None if they are unknown; `unread` is why, if
    the engine gets no requests for that reason."""

    name: str
    role: EngineRole
    source_group: str
    group: str
    models: frozenset[str] | None
    kv: KvFacts
    unread: str = ""


class FindingKind(StrEnum):
    NO_PARTNER = "no_partner"
    """Engines that cannot exchange KV with any engine of the other role."""
    SHARED_ID = "shared_id"
    LEASES_DIFFER = "leases_differ"
    UNKNOWN_MODELS = "unknown_models"
    """Engines that get no requests, because it is unknown which models they serve."""


class Finding(NamedTuple):
    """Something wrong with the fleet. `detail` is the reason without the engines' names.
    `is_degraded` is False if the engines work all the same."""

    kind: FindingKind
    engines: tuple[str, ...]
    text: str
    cure: str
    detail: str
    is_degraded: bool = True

    def content(self) -> dict[str, Any]:
        """Return what /ready shows."""
        return {
            "kind": str(self.kind),
            "engines": list(self.engines),
            "text": self.text,
            "cure": self.cure,
        }


@dataclass(frozen=True, slots=True)
class FleetReport:
    """The findings about a fleet. `reasons` maps engines to why no KV moves to or from them."""

    findings: Sequence[Finding] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)


NOTHING_FOUND = FleetReport()


def find_difference(prefiller: EngineFacts, decoder: EngineFacts) -> Difference | None:
    """Return the first fact because of which no KV moves between two engines; None if they fit."""
    p, d = prefiller, decoder
    if p.source_group != d.source_group:
        return Difference(
            f"groups {p.source_group} and {d.source_group}",
            "name the same group for both engines where they are listed",
        )
    if p.models is not None and d.models is not None and not p.models & d.models:
        return Difference(
            f"models {_listed(sorted(p.models))} and {_listed(sorted(d.models))}",
            "each model needs engines of both roles: start those that are missing, or start both "
            "engines with the same --model and --served-model-name",
        )
    if found := find_kv_difference(p.kv, d.kv):
        return found
    has_both = p.kv.has_page and d.kv.has_page and p.kv.extension
    if p.group != d.group and has_both and p.kv.configuration != d.kv.configuration:
        return Difference(
            f"{CONFIGURATION} {p.kv.configuration or NONE} and {d.kv.configuration or NONE}",
            "install the same release of disagg-router beside both engines",
        )
    if p.group != d.group:
        return Difference(
            f"groups {p.group} and {d.group}",
            "an engine without an identity page is in no group with engines of several kinds: "
            "name its group where it is listed",
        )
    return None


@dataclass(slots=True)
class _EngineKind:
    """Engines of a role that are equal in all facts but their names."""

    sample: EngineFacts
    names: list[str] = field(default_factory=list)


_Kinds = Mapping[EngineRole, Sequence[_EngineKind]]
# By the places of a prefill and a decode engine in _Kinds.
_Differences = Mapping[tuple[int, int], Difference | None]


def compare_engines(
    engines: Iterable[EngineFacts], shared_ids: Mapping[str, tuple[str, str]] | None = None
) -> FleetReport:
    """Compare each prefill engine with each decode engine.

    `shared_ids` maps engines to another engine with the same engine_id, and that id (see
    `find_duplicate_ids`). A role without any engine is not reported here.
    """
    engines = list(engines)
    kinds = _kinds_by_role(one for one in engines if not one.unread)
    reasons: dict[str, str] = {}
    findings = [*_unread(engines, reasons)]
    if max(map(len, kinds.values())) <= MAX_KINDS:
        differences = {
            (i, j): find_difference(p.sample, d.sample)
            for i, p in enumerate(kinds[PREFILL])
            for j, d in enumerate(kinds[DECODE])
            if _are_several(p, d)
        }
        findings += _without_partner(kinds, differences, reasons)
        findings += _leases(kinds, differences)
    findings += _shared_ids(shared_ids or {}, reasons)
    return FleetReport(tuple(findings), reasons)


def _unread(engines: Iterable[EngineFacts], reasons: dict[str, str]) -> Iterable[Finding]:
    """Yield a finding for each reason why models are unknown. Sets `reasons`."""
    names: dict[str, list[str]] = {}
    for one in engines:
        if one.unread:
            names.setdefault(one.unread, []).append(one.name)
            reasons[one.name] = f"its models are unknown: {one.unread}"
    for why, found in names.items():
        text = f"it is unknown which models {_listed(found)} serve{'s' if len(found) == 1 else ''}"
        yield Finding(
            FindingKind.UNKNOWN_MODELS,
            tuple(found),
            f"{text}, so no requests go there: {why}",
            "set --engine-api-key-file if it requires a key, or name its models where it is listed",
            why,
        )


def _kinds_by_role(engines: Iterable[EngineFacts]) -> dict[EngineRole, list[_EngineKind]]:
    kinds: dict[EngineRole, dict[tuple[object, ...], _EngineKind]] = {role: {} for role in LEGS}
    for one in engines:
        key = (one.role, one.source_group, one.group, one.models, one.kv)
        for role in LEGS:
            if one.role.plays(role):
                kinds[role].setdefault(key, _EngineKind(one)).names.append(one.name)
    return {role: list(found.values()) for role, found in kinds.items()}


def _are_several(p: _EngineKind, d: _EngineKind) -> bool:
    """Return False for one engine that plays both roles: it loads no KV from itself."""
    return len({*p.names, *d.names}) > 1


def _may_need(kind: _EngineKind, other: _EngineKind) -> bool:
    """Return False if `kind` has both roles, and its source puts `other` in another group: an
    engine of both roles may be alone in its group."""
    one = kind.sample
    return one.role is not BOTH or one.source_group == other.sample.source_group


def _without_partner(
    kinds: _Kinds, differences: _Differences, reasons: dict[str, str]
) -> Iterable[Finding]:
    """Yield a finding for each kind of engine that fits none of the other role. Sets `reasons`."""
    reported: set[tuple[int, int]] = set()
    for role, place in ((PREFILL, 0), (DECODE, 1)):
        others = kinds[role.other]
        for number, kind in enumerate(kinds[role]):
            pairs = [
                (pair, found)
                for pair, found in differences.items()
                if pair[place] == number and _may_need(kind, others[pair[1 - place]])
            ]
            if not pairs or any(found is None for _, found in pairs):
                continue
            pair, found = pairs[0]
            assert found is not None
            p, d = kinds[PREFILL][pair[0]], kinds[DECODE][pair[1]]
            reasons |= dict.fromkeys(kind.names, _reason(kind, d if kind is p else p, found))
            if pair not in reported:
                reported.add(pair)
                yield _no_partner(p, d, found)


def _reason(kind: _EngineKind, other: _EngineKind, found: Difference) -> str:
    if found.text != NO_CONNECTOR:
        return f"engines differ: {found.text}"
    if not kind.sample.kv.has_connector:
        return NO_CONNECTOR
    return f"{_listed(other.names)} {_was(other.names)} {NO_CONNECTOR}"


def _no_partner(p: _EngineKind, d: _EngineKind, found: Difference) -> Finding:
    if found.text == NO_CONNECTOR:
        lacking = [
            (role, kind.names)
            for role, kind in ((PREFILL, p), (DECODE, d))
            if not kind.sample.kv.has_connector
        ]
        who = " and ".join(_engines(*one) for one in lacking)
        were = _was([name for _, names in lacking for name in names])
        text = f"{who} {were} {NO_CONNECTOR}, so no KV moves"
    else:
        who = f"{_engines(PREFILL, p.names)} and {_engines(DECODE, d.names)}"
        text = f"{who} cannot exchange KV, because they differ: {found.text}"
    both = tuple(dict.fromkeys([*p.names, *d.names]))
    return Finding(FindingKind.NO_PARTNER, both, text, found.cure, found.text)


def _shared_ids(
    shared: Mapping[str, tuple[str, str]], reasons: dict[str, str]
) -> Iterable[Finding]:
    seen: set[tuple[str, ...]] = set()
    for name, (other, engine_id) in shared.items():
        pair = tuple(sorted((name, other)))
        reasons.setdefault(name, f"engine_id {short_text(engine_id)} is also that of {other}")
        if pair not in seen:
            seen.add(pair)
            yield Finding(
                FindingKind.SHARED_ID,
                pair,
                f"engines {pair[0]} and {pair[1]} have the same engine_id, {short_text(engine_id)}",
                "give each engine an engine_id of its own",
                short_text(engine_id),
            )


def _leases(kinds: _Kinds, differences: _Differences) -> Iterable[Finding]:
    """Yield a finding for pairs that fit, of which the decode engine renews too seldom."""
    for (i, j), difference in differences.items():
        p, d = kinds[PREFILL][i], kinds[DECODE][j]
        granted, renewed = p.sample.kv.lease_seconds, d.sample.kv.lease_seconds
        if difference is None and granted and renewed and granted != renewed:
            yield Finding(
                FindingKind.LEASES_DIFFER,
                tuple(dict.fromkeys([*p.names, *d.names])),
                f"{_engines(PREFILL, p.names)} grants leases of {granted:g} s, and "
                f"{_engines(DECODE, d.names)} renews them as if they lasted {renewed:g} s",
                "give both engines the same kv_lease_duration",
                f"kv_lease_duration {granted:g} and {renewed:g}",
                is_degraded=False,
            )


def _engines(role: EngineRole, names: Sequence[str]) -> str:
    return f"{role} engine{'s' if len(names) > 1 else ''} {_listed(names)}"


def _was(names: Sequence[str]) -> str:
    return "was" if len(names) == 1 else "were"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(short_text(name) for name in names[:MAX_NAMES])
    return shown + (f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else "")


def find_duplicate_ids(engines: Iterable[Engine]) -> Mapping[str, tuple[str, str]]:
    """Map each engine that shares its engine_id to another engine with that id, and the id.

    Engines identify each other by that id: two engines with the same one transfer no KV to each
    other, and a stock engine confuses them. An engine that is listed under two addresses has one
    side channel and is no duplicate of itself.
    """
    by_id: dict[str, list[tuple[tuple[str, int], str]]] = {}
    for engine in engines:
        for at in engine.capabilities.rank_endpoints.values():
            endpoint = at.remote_host, at.remote_port
            by_id.setdefault(at.remote_engine_id, []).append((endpoint, engine.name))
    found: dict[str, tuple[str, str]] = {}
    for engine_id, holders in by_id.items():
        first, *_ = holders
        other = next((one for one in holders if one[0] != first[0] and one[1] != first[1]), None)
        if other is None:
            continue
        for endpoint, name in holders:
            found[name] = (other[1] if endpoint == first[0] else first[1]), engine_id
    return found
