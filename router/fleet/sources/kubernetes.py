"""Engines that are pods: listed, watched from there, and listed again whenever that cannot go on.

A watch alone is not enough. After a gap it tells what is there and not what has gone, so only a new
list removes who was deleted unseen; and where nothing is heard, the list finds out whether there is
nothing to hear. While the API server is away, the pods known last are the engines.
"""

from __future__ import annotations

import contextlib
import random
import time
from asyncio import sleep
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Protocol

from router.fleet.engine_spec import EngineRole, Intent, ListedEngine
from router.fleet.sources.backoff import Backoff
from router.fleet.sources.pod_api import PodChange, VersionExpiredError
from router.fleet.sources.pod_engines import Pod, PodEngine, read_pod
from router.fleet.sources.source import SourceError, SourceReport
from router.settings import Address

# Watches, one after the other, until all is listed anew: ten minutes, if nothing goes wrong.
ROUNDS = 10
# Seconds after which a watch is no failure, whatever ends it.
STEADY = 5.0
MOST_TOLD = 3


class PodLister(Protocol):
    """Where pods are asked for: PodApi."""

    async def list_all(self) -> tuple[list[Pod], str]: ...

    def watch(self, version: str) -> AsyncGenerator[list[PodChange], None]: ...

    async def close(self) -> None: ...


class KubernetesSource:
    def __init__(
        self,
        role: EngineRole,
        port: str,
        api: PodLister,
        steady: float = STEADY,
        chance: Callable[[], float] = random.random,
        scheme: str = "http",
    ) -> None:
        self.name = f"kubernetes:{role}"
        self.first = SourceReport()
        self._role = role
        self._port = port
        self._scheme = scheme
        self._api = api
        self._steady = steady
        self._backoff = Backoff(chance)
        self._seen: dict[str, PodEngine] = {}

    async def watch(self) -> AsyncGenerator[SourceReport, None]:
        try:
            while True:
                try:
                    async with contextlib.aclosing(self._follow()) as reports:
                        async for report in reports:
                            yield report
                except VersionExpiredError:
                    await sleep(self._backoff.next())  # as happens when much changes
                except SourceError as error:
                    yield SourceReport(None, str(error))
                    await sleep(self._backoff.next())
        finally:
            await self._api.close()

    async def _follow(self) -> AsyncGenerator[SourceReport, None]:
        """Until all has to be listed again. Raises SourceError."""
        pods, version = await self._api.list_all()
        self._seen = {pod.metadata.name: self._look(pod) for pod in pods}
        yield self._report()
        for _ in range(ROUNDS):
            began = time.monotonic()
            async with contextlib.aclosing(self._api.watch(version)) as arriving:
                async for changes in arriving:
                    version = changes[-1].version or version
                    taken = [self._takes(change) for change in changes]
                    if any(taken):
                        yield self._report()
            if time.monotonic() - began < self._steady:
                raise SourceError("the API server ends a watch as soon as it has begun")
            self._backoff.reset()
            yield self._report()

    def _takes(self, change: PodChange) -> bool:
        """Whether anything is different by that."""
        if change.pod is None:
            return False
        name, none = change.pod.metadata.name, PodEngine(None)
        before = self._seen.pop(name, none)
        after = none if change.is_deleted else self._look(change.pod)
        if after != none:
            self._seen[name] = after
        return after != before

    def _look(self, pod: Pod) -> PodEngine:
        return read_pod(pod, self._role, self._port, self._scheme)

    def _report(self) -> SourceReport:
        troubles = sorted(one.problem for one in self._seen.values() if one.problem)
        more = [f"and {len(troubles) - MOST_TOLD} more"] if len(troubles) > MOST_TOLD else []
        listed = [one.listed for one in self._seen.values() if one.listed is not None]
        return SourceReport(distinct(listed), "; ".join([*troubles[:MOST_TOLD], *more]))


def distinct(listed: Iterable[ListedEngine]) -> tuple[ListedEngine, ...]:
    """One for each address: an address that is given anew may still be named by the pod that had it
    before, and that is the one which drains."""
    found: dict[Address, ListedEngine] = {}
    for one in listed:
        before = found.setdefault(one.address, one)
        if before.intent is Intent.DRAINING:
            found[one.address] = one
    return tuple(found.values())
