"""Engines that are pods: listed, then watched, and listed again whenever the watch breaks off.

A watch alone is not enough. After a gap it reports which pods exist but not which were deleted, so
only a new list removes those; and when a watch is quiet, the list finds out whether it is broken.
While the API server cannot be reached, the last known pods are the engines.
"""

from __future__ import annotations

import contextlib
import random
import time
from asyncio import sleep
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Protocol

from router.fleet.engine_spec import EngineRole, Intent, ListedEngine
from router.fleet.sources.pod_api import (
    PodChange,
    VersionExpiredError,
)
from router.fleet.sources.pod_engines import Pod, PodEngine, read_pod
from router.fleet.sources.source import (
    Backoff,
    SourceError,
    SourceReport,
)
from router.settings import Address

# Successive watches until the next list: ten minutes, if nothing fails.
WATCHES_PER_LIST = 10
# A watch that lasted this long is no failure, whatever ended it.
MIN_WATCH_S = 5.0
MAX_REPORTED_PODS = 3


class PodLister(Protocol):
    """The part of PodApi that KubernetesSource uses."""

    async def list_all(self) -> tuple[list[Pod], str]: ...

    def watch(self, version: str) -> AsyncGenerator[list[PodChange], None]: ...

    async def close(self) -> None: ...


class KubernetesSource:
    """The engines of one role. `port` (a number or a name) and `scheme` are the defaults for pods
    without annotations."""

    def __init__(
        self,
        role: EngineRole,
        port: str,
        api: PodLister,
        min_watch: float = MIN_WATCH_S,
        random_share: Callable[[], float] = random.random,
        scheme: str = "http",
    ) -> None:
        self.name = f"kubernetes:{role}"
        self.first = SourceReport()
        self._role = role
        self._port = port
        self._scheme = scheme
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
        for _ in range(WATCHES_PER_LIST):
            began = time.monotonic()
            async with contextlib.aclosing(self._api.watch(version)) as arriving:
                async for changes in arriving:
                    version = changes[-1].version or version
                    effects = [self._apply(change) for change in changes]
                    if any(effects):
                        yield self._report()
            if time.monotonic() - began < self._min_watch:
                raise SourceError("the API server ends each watch at once")
            self._backoff.reset()
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

    def _read(self, pod: Pod) -> PodEngine:
        return read_pod(pod, self._role, self._port, self._scheme)

    def _report(self) -> SourceReport:
        problems = sorted(one.problem for one in self._pods.values() if one.problem)
        if (num_more := len(problems) - MAX_REPORTED_PODS) > 0:
            problems = [*problems[:MAX_REPORTED_PODS], f"and {num_more} more"]
        listed = [one.listed for one in self._pods.values() if one.listed is not None]
        return SourceReport(distinct(listed), "; ".join(problems))


def distinct(listed: Iterable[ListedEngine]) -> tuple[ListedEngine, ...]:
    """Return one engine per address. A reused address may still be listed by its former pod, which
    is the draining one."""
    found: dict[Address, ListedEngine] = {}
    for one in listed:
        before = found.setdefault(one.address, one)
        if before.intent is Intent.DRAINING:
            found[one.address] = one
    return tuple(found.values())
