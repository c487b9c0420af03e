"""Engines that are pods: listed, then watched, and listed again whenever the watch breaks off.

A watch alone is not enough. After a gap it reports which pods exist but not which were deleted, so
only a new list removes those; and when a watch is quiet, the list finds out whether it is broken.
While the API server cannot be reached, the last known pods are the engines.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from asyncio import sleep
from collections.abc import AsyncGenerator, Callable, Iterable
from functools import partial
from typing import NamedTuple

from router.fleet.engine import DEFAULT_GROUP, EngineRole, EngineSpec, Intent
from router.fleet.kv_protocol import KvProtocol
from router.fleet.sources.pod_api import Pod, PodApi, PodChange, VersionExpiredError
from router.fleet.sources.source import Backoff, SourceError, SourceReport
from router.settings import MAX_GROUP_WEIGHT, Address, canonical, is_port

# Successive watches until the next list: ten minutes, if nothing fails.
WATCHES_PER_LIST = 10
# A watch that lasted this long is no failure, whatever ended it: proxies cut long connections.
MIN_WATCH_S = 2.0
# After a list that was read, the backoff continues with at most so many failures: a pause of 4 s.
MAX_FAILURES_AFTER_LIST = 3
MAX_REPORTED_PODS = 3
# Labels and annotations of a pod that describe its engine; annotations take precedence.
PREFIX = "disagg-router.io/"
LLM_D_ROLE = "llm-d.ai/role"
ROLES = {
    "prefill": EngineRole.PREFILL,
    "decode": EngineRole.DECODE,
    "both": EngineRole.BOTH,
    "prefill-decode": EngineRole.BOTH,
}
ENDED_PHASES = ("Succeeded", "Failed")


class PodEngine(NamedTuple):
    """`listed` is None for a pod that is not an engine now; `problem` is why, if it should be."""

    listed: EngineSpec | None
    problem: str = ""


def read_pod(pod: Pod, role: EngineRole, port: str, scheme: str = "http") -> PodEngine:
    """Return the engine of a pod. `role`, `port` and `scheme` are the defaults for pods without
    labels or annotations."""
    intent = _intent(pod)
    if intent is None:
        return PodEngine(None)
    try:
        return PodEngine(_spec(pod, role, port, scheme, intent))
    except (SourceError, ValueError) as error:
        return PodEngine(None, f"pod {pod.metadata.name[:253]}: {error}")


class KubernetesSource:
    """The engines of one role. `port` (a number or a name) and `scheme` are the defaults for pods
    without annotations."""

    def __init__(
        self,
        role: EngineRole,
        port: str,
        api: PodApi,
        min_watch: float = MIN_WATCH_S,
        random_share: Callable[[], float] = random.random,
        scheme: str = "http",
    ) -> None:
        self.name = f"kubernetes:{role}"
        self.first = SourceReport()
        self._read = partial(read_pod, role=role, port=port, scheme=scheme)
        self._api = api
        self._min_watch = min_watch
        self._backoff = Backoff(random_share)
        self._pods: dict[str, PodEngine] = {}

    async def watch(self) -> AsyncGenerator[SourceReport, None]:
        try:
            while True:
                try:
                    async with contextlib.aclosing(self._follow()) as reports:
                        async for report in reports:
                            yield report
                except VersionExpiredError:
                    await sleep(self._backoff.next())  # normal when much changes
                except SourceError as error:
                    yield SourceReport(None, str(error))
                    await sleep(self._backoff.next())
        finally:
            await self._api.close()

    async def _follow(self) -> AsyncGenerator[SourceReport, None]:
        """List the pods and watch them until they have to be listed again. Raises SourceError."""
        pods, version = await self._api.list_all()
        self._pods = {pod.metadata.name: self._read(pod) for pod in pods}
        yield self._report()
        self._backoff.reset(MAX_FAILURES_AFTER_LIST)
        for _ in range(WATCHES_PER_LIST):
            began, failure = time.monotonic(), None
            try:
                async with contextlib.aclosing(self._api.watch(version)) as arriving:
                    async for changes in arriving:
                        version = changes[-1].version or version
                        effects = [self._apply(change) for change in changes]
                        if any(effects):
                            yield self._report()
            except SourceError as error:
                failure = error
            if time.monotonic() - began >= self._min_watch:
                self._backoff.reset()
            elif failure is None:
                failure = SourceError("the API server ends each watch at once")
            if failure is not None:
                raise failure
            yield self._report()

    def _apply(self, change: PodChange) -> bool:
        """Return True if the change concerns an engine."""
        if change.pod is None:
            return False
        name, none = change.pod.metadata.name, PodEngine(None)
        before = self._pods.pop(name, none)
        after = none if change.is_deleted else self._read(change.pod)
        if after != none:
            self._pods[name] = after
        return after != before

    def _report(self) -> SourceReport:
        problems = sorted(one.problem for one in self._pods.values() if one.problem)
        if (num_more := len(problems) - MAX_REPORTED_PODS) > 0:
            problems = [*problems[:MAX_REPORTED_PODS], f"and {num_more} more"]
        listed = [one.listed for one in self._pods.values() if one.listed is not None]
        return SourceReport(distinct(listed), "; ".join(problems))


def distinct(listed: Iterable[EngineSpec]) -> tuple[EngineSpec, ...]:
    """Return one engine per address. A reused address may still be listed by its former pod, which
    is the draining one."""
    found: dict[Address, EngineSpec] = {}
    for one in listed:
        before = found.setdefault(one.address, one)
        if before.intent is Intent.DRAINING:
            found[one.address] = one
    return tuple(found.values())


def _intent(pod: Pod) -> Intent | None:
    """Return None for a pod that has not started or has ended. A pod that is being deleted may have
    legs to finish, whether it is still ready or not."""
    if pod.status.phase in ENDED_PHASES or not pod.status.pod_ip:
        return None
    if pod.metadata.deletion_timestamp:
        return Intent.DRAINING
    conditions = pod.status.conditions or ()
    is_ready = any(one.type == "Ready" and one.status == "True" for one in conditions)
    return Intent.SERVING if is_ready else None


def _spec(pod: Pod, role: EngineRole, port: str, scheme: str, intent: Intent) -> EngineSpec:
    """Raises SourceError, ValueError."""

    def described(what: str) -> str | None:
        for given in (pod.metadata.annotations, pod.metadata.labels):
            if given and PREFIX + what in given:
                return given[PREFIX + what]
        return None

    given_role = described("role")
    if given_role is None:  # a role of llm-d that is not one of ours means the default role
        role = ROLES.get((pod.metadata.labels or {}).get(LLM_D_ROLE, ""), role)
    elif given_role in ROLES:
        role = ROLES[given_role]
    else:
        raise SourceError(f"{PREFIX}role is {given_role[:64]!r}, not prefill, decode or both")
    scheme = described("scheme") or scheme
    if scheme not in ("http", "https"):  # a misspelt scheme must not mean plain HTTP
        raise SourceError(f"{PREFIX}scheme is {scheme[:64]!r}, not http or https")
    given_weight = described("weight")
    try:
        weight = 1.0 if given_weight is None else float(given_weight)
    except ValueError:
        weight = math.nan
    if not 0 <= weight <= MAX_GROUP_WEIGHT:
        problem = f"{str(given_weight)[:64]!r}, not a number from 0 to 1e6"
        raise SourceError(f"{PREFIX}weight is {problem}")
    kv_protocol, bootstrap_port = described("kv-protocol"), described("bootstrap-port")
    if kv_protocol is not None and kv_protocol not in [*KvProtocol]:
        problem = f"{kv_protocol[:64]!r}, not one of {', '.join(KvProtocol)}"
        raise SourceError(f"{PREFIX}kv-protocol is {problem}")
    if bootstrap_port is not None and not is_port(bootstrap_port):
        raise SourceError(f"{PREFIX}bootstrap-port is {bootstrap_port[:64]!r}, not a port")
    address = Address(canonical(pod.status.pod_ip or ""), _port(pod, described("port") or port))
    models = frozenset((described("models") or "").replace(",", " ").split())
    group = described("group") or DEFAULT_GROUP
    return EngineSpec(
        role,
        address,
        models,
        group,
        weight,
        scheme == "https",
        intent,
        None if kv_protocol is None else KvProtocol(kv_protocol),
        int(bootstrap_port or 0),
    )


def _port(pod: Pod, wanted: str) -> int:
    """Raises SourceError."""
    if is_port(wanted):
        return int(wanted)
    for container in (pod.spec.containers or []) + (pod.spec.init_containers or []):
        for port in container.ports or ():
            if port.name == wanted and 0 < port.container_port < 65536:
                return port.container_port
    raise SourceError(f"has no port {wanted[:64]!r}")
