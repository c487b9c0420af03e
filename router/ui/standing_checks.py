"""The router's continuous checks as a list for the dashboard: discovery, engines, KV, files.

These are the checks that `/ready` and `disagg-router status` report. `disagg-router doctor` checks
more, because it may send requests.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from time import monotonic as now

from pydantic import BaseModel

from router.common.tls import TlsContext
from router.common.watched_file import WatchedFiles
from router.fleet.consistency import count_groups
from router.fleet.engine import LEGS, Health
from router.fleet.fleet import Fleet
from router.fleet.pair_rates import SLOW_CURE
from router.fleet.partners import FindingKind
from router.fleet.registry import EngineRegistry
from router.fleet.unreachable_pairs import WRONG_KV_CURE

# The most results of one process, and the longest text in characters.
MAX_RESULTS = 32
MAX_CHECK_TEXT = 400
# A certificate that expires sooner is reported.
EXPIRY_WARNING_S = 14 * 24 * 3600.0
FINDING_NAMES = {
    FindingKind.NO_PARTNER: "KV transfer",
    FindingKind.SHARED_ID: "engine ids",
    FindingKind.LEASES_DIFFER: "KV leases",
    FindingKind.UNKNOWN_MODELS: "models",
}


class CheckState(StrEnum):
    """In the order of severity."""

    OK = "ok"
    SKIPPED = "skipped"
    WARNING = "warning"
    FAILED = "failed"


class CheckResult(BaseModel):
    """The result of one check: what was found, and what to do about it."""

    name: str
    state: CheckState
    text: str
    cure: str = ""


def run_checks(
    fleet: Fleet,
    registry: EngineRegistry,
    files: Mapping[str, WatchedFiles],
    certificates: Mapping[str, TlsContext],
) -> list[CheckResult]:
    """Return the results as they are now, without asking any engine."""
    found = [
        *_check_sources(registry),
        *_check_roles(fleet),
        *_check_kv(fleet),
        *_check_groups(fleet),
        *_check_files(files, certificates),
    ][:MAX_RESULTS]
    for one in found:
        one.text, one.cure = one.text[:MAX_CHECK_TEXT], one.cure[:MAX_CHECK_TEXT]
    return found


def merge_results(processes: Iterable[Iterable[CheckResult]]) -> list[CheckResult]:
    """Merge the results of all processes: of each check the worst result counts."""
    found: dict[tuple[str, str], CheckResult] = {}
    for results in processes:
        for one in results:
            # A check may have several results that are not OK, such as one for each finding.
            is_well = one.state is CheckState.OK
            found.setdefault((one.name, "" if is_well else one.text), one)
    worse = {name for (name, text) in found if text}
    return [one for (name, text), one in found.items() if text or name not in worse]


def _check_sources(registry: EngineRegistry) -> Iterator[CheckResult]:
    problems = registry.problems()
    for one in registry.sources:
        name, count = f"discovery: {one.source.name}", len(one.listed)
        if why := problems.get(one.source.name):
            text = f"{why}; the last list, with {_engines(count)}, stays in use"
            yield CheckResult(name=name, state=CheckState.WARNING, text=text)
        else:
            yield CheckResult(name=name, state=CheckState.OK, text=f"{_engines(count)} listed")
    if why := problems.get("registry"):
        yield CheckResult(name="discovery", state=CheckState.FAILED, text=why)


def _check_roles(fleet: Fleet) -> Iterator[CheckResult]:
    for role in LEGS:
        engines = [engine for engine in fleet.engines if engine.role.plays(role)]
        healthy = sum(engine.health is Health.HEALTHY for engine in engines)
        state = CheckState.OK if healthy == len(engines) else CheckState.WARNING
        if not healthy:
            state = CheckState.FAILED
        text = f"{healthy} of {len(engines)} healthy" if engines else "no engine is known"
        cure = "" if engines else f"name one with --{role}"
        yield CheckResult(name=f"{role} engines", state=state, text=text, cure=cure)


def _check_kv(fleet: Fleet) -> Iterator[CheckResult]:
    """Yield what `Fleet.compare` finds, and the pairs of engines that could not exchange KV."""
    findings = fleet.compare().findings
    for finding in findings:
        state = CheckState.FAILED if finding.is_degraded else CheckState.WARNING
        name = FINDING_NAMES[finding.kind]
        yield CheckResult(name=name, state=state, text=finding.text, cure=finding.cure)
    healthy = [engine for engine in fleet.engines if engine.health is Health.HEALTHY]
    compared = [engine for engine in healthy if engine.capabilities.kv.has_page]
    if all(one.kind is not FindingKind.NO_PARTNER for one in findings):
        text = f"{_engines(len(compared))} compared: each one has a partner to exchange KV with"
        state = CheckState.OK
        if not all(any(engine.role.plays(role) for engine in healthy) for role in LEGS):
            text = "no healthy engines of both roles to compare"
            state = CheckState.SKIPPED
        elif len(compared) < len(healthy):
            text = f"{len(compared)} of {_engines(len(healthy))} can be compared: "
            text += "the others have no identity page (stock vLLM)"
            state = CheckState.SKIPPED
        yield CheckResult(name="KV transfer", state=state, text=text)
    for prefiller, decoder in fleet.unreachable_pairs.avoided(now()):
        text = f"no KV was loaded from {prefiller} to {decoder}; this pair is avoided for a while"
        cure = "look at the decode engine's log: does it reach the other's side channel?"
        if fleet.unreachable_pairs.is_silent(prefiller, decoder):
            text = f"wrong KV was loaded from {prefiller} to {decoder}: another first token; this "
            text += "pair is avoided for a while"
            cure = WRONG_KV_CURE
        yield CheckResult(name="KV pair", state=CheckState.WARNING, text=text, cure=cure)
    for pair, slow in fleet.pair_rates.slow.items():
        text = slow.describe(pair)
        yield CheckResult(name="KV rate", state=CheckState.WARNING, text=text, cure=SLOW_CURE)


def _check_groups(fleet: Fleet) -> Iterator[CheckResult]:
    groups = count_groups(fleet)
    if len(groups) < 2:
        return
    for name, group in groups.items():
        text = f"{group.prefillers} prefill and {_engines(group.decoders, 'decode ')} usable"
        state = CheckState.OK if group.is_complete else CheckState.WARNING
        text += f", weight {group.weight:g}"
        yield CheckResult(name=f"group {name}", state=state, text=text)


def _check_files(
    files: Mapping[str, WatchedFiles], certificates: Mapping[str, TlsContext]
) -> Iterator[CheckResult]:
    for name, file in files.items():
        if file.trouble:
            text = f"{file.trouble}; the last usable content stays in force"
            yield CheckResult(name=f"file {name}", state=CheckState.WARNING, text=text)
        else:
            yield CheckResult(name=f"file {name}", state=CheckState.OK, text="in force")
    for name, one in certificates.items():
        left = None if one.expires_at is None else one.expires_at - time.time()
        if left is not None and left < EXPIRY_WARNING_S:
            days = f"expires in {left / 86400:.1f} days" if left > 0 else "has expired"
            state = CheckState.WARNING if left > 0 else CheckState.FAILED
            yield CheckResult(name=f"certificate {name}", state=state, text=days)


def _engines(count: int, kind: str = "") -> str:
    return f"{count} {kind}engine{'' if count == 1 else 's'}"
