"""Gathers while somebody looks, and tells all who do. While nobody looks it does not run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import orjson

from router.fleet.registry import EngineRegistry
from router.http_client.deadlines import now
from router.proxy.gateway import Gateway
from router.ui.engine_polling import EnginePoller
from router.ui.live_requests import LiveRequests, RequestFeed
from router.ui.other_workers import OtherWorkers
from router.ui.request_view import Origin
from router.ui.snapshot import Json, ProcessSnapshot, changes, merge_snapshots, take_snapshot
from router.ui.transfers import TransferMatcher
from router.ui.viewers import MOST_WATCHERS, Viewer
from router.ui.visible_settings import visible_settings

logger = logging.getLogger("disagg_router.page")
TICK = 0.25
MOST_ENDED = 256
# How many that have ended are told at once, the youngest; the others are counted.
MOST_TOLD = 100


class TooManyViewersError(Exception):
    """So many look already that one more is refused."""


class SnapshotSource:
    """What this process sees, as long as somebody wants to know: a page here, or a sibling's."""

    def __init__(self, gateway: Gateway, registry: EngineRegistry) -> None:
        self._gateway = gateway
        self._registry = registry
        self._watch = LiveRequests()

    @contextlib.contextmanager
    def looked_at(self) -> Iterator[Callable[[], ProcessSnapshot]]:
        """What it gives is what to look with."""
        look, watch = RequestFeed(), self._watch
        watch.looks.append(look)
        self._gateway.watch = watch
        try:
            yield lambda: self._picture(watch, look)
        finally:
            watch.looks.remove(look)
            if not watch.looks:
                self._gateway.watch, self._watch = None, LiveRequests()

    def _picture(self, watch: LiveRequests, look: RequestFeed) -> ProcessSnapshot:
        origin = Origin(str(os.getpid()), time.time() - now())
        return take_snapshot(self._gateway, self._registry, watch, look, origin)


class DashboardHub:
    """`siblings` are the other processes of this router, if it has any."""

    def __init__(self, gateway: Gateway, registry: EngineRegistry) -> None:
        self._gateway = gateway
        self.own = SnapshotSource(gateway, registry)
        self.siblings: OtherWorkers | None = None
        self._watchers: set[Viewer] = set()
        self._work: asyncio.Task[None] | None = None
        self._picture: Json = {}
        self._ended: deque[Json] = deque(maxlen=MOST_ENDED)
        self._awaited = TransferMatcher()

    @property
    def watchers(self) -> int:
        return len(self._watchers)

    @contextlib.contextmanager
    def watching(self) -> Iterator[Viewer]:
        """Raises TooManyViewersError."""
        if len(self._watchers) >= MOST_WATCHERS:
            raise TooManyViewersError
        watcher = Viewer()
        if self._work is None or self._work.done():
            self._picture = {}
            self._work = asyncio.get_running_loop().create_task(self._run())
        elif self._picture:  # else the first look is under way, and goes to all
            watcher.put(self._whole())
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)
            if not self._watchers:
                self._stop()

    def _stop(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.cancel()
        self._picture = {}
        self._ended.clear()
        self._awaited = TransferMatcher()

    async def _run(self) -> None:
        """Until nobody looks, or the router is to end, or a fault of ours: then all are cut."""
        try:
            with self.own.looked_at() as look:
                await self._tell_with_helpers(look)
        except Exception:
            logger.exception("the page cannot be told what happens")
        finally:
            if self._work is asyncio.current_task():  # else others look by now
                for watcher in self._watchers:
                    watcher.cut()

    async def _tell_with_helpers(self, look: Callable[[], ProcessSnapshot]) -> None:
        engines = EnginePoller(self._gateway.fleet)
        async with asyncio.TaskGroup() as group:
            helpers = [group.create_task(engines.run())]
            if self.siblings is not None:
                helpers.append(group.create_task(self.siblings.run()))
            while not self._gateway.draining:
                self._tell(look(), engines)
                await asyncio.sleep(TICK)
            for helper in helpers:
                helper.cancel()

    def _tell(self, own: ProcessSnapshot, engines: EnginePoller) -> None:
        pictures: list[ProcessSnapshot | None] = [own]
        ended, untold = own.ended, own.untold
        if self.siblings is not None:
            pictures += self.siblings.pictures()
            more, missed = self.siblings.take_ended()
            ended = sorted([*ended, *more], key=lambda one: one.at)
            untold += missed
        untold += max(0, len(ended) - MOST_TOLD)
        shown = ended[-MOST_TOLD:]
        told = [one.model_dump(mode="json") for one in shown]
        self._awaited.expect(shown)
        moves = self._awaited.take(engines.pages(), time.time() - now())
        before, self._picture = (
            self._picture,
            merge_snapshots(pictures, engines.told(), engines.rates()),
        )
        self._ended.extend(told)
        moved = {key: one.model_dump(mode="json") for key, one in moves.items()}
        for one in self._ended:
            if one["key"] in moved:
                one["moved"] = moved[one["key"]]
        if not before:
            self._send(self._whole())
            return
        if told:
            self._send(event("ended", {"requests": told, "untold": untold}))
        if moved:
            self._send(event("moved", moved))
        if found := changes(before, self._picture):
            self._send(event("change", found))

    def _send(self, told: bytes) -> None:
        for watcher in self._watchers:
            watcher.put(told)

    def _whole(self) -> bytes:
        settings = self._gateway.settings
        about = {
            "version": version("disagg-router"),
            "settings": [one.model_dump(mode="json") for one in visible_settings(settings)],
            "ended": list(self._ended),
            "conversations": {"store": settings.conversation_store.partition("://")[0]},
            "ttl": settings.conversation_ttl,
        }
        return event("snapshot", self._picture | about)


def event(name: str, content: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), orjson.dumps(content))
