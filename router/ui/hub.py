"""Sends the dashboard's events to its viewers. Without viewers nothing runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from importlib.metadata import metadata, version
from time import monotonic as now
from typing import Any

import orjson
from pydantic import SecretStr

from router.proxy.gateway import Gateway
from router.settings import SECRET_NAMES, Settings, flag_of, group_title, unit_of, value_text
from router.ui.engine_reports import EnginePoller, TransferMatcher
from router.ui.live_requests import MAX_RECENT, REFUSAL_WINDOW_S
from router.ui.snapshot import (
    Json,
    OtherWorkers,
    ProcessSnapshot,
    SnapshotSource,
    changes,
    merge_snapshots,
)

logger = logging.getLogger("disagg_router.ui")
UPDATE_INTERVAL_S = 0.25
MAX_ENDED = 256
# The most ended requests in one event: the latest ones. The others are only counted.
MAX_ENDED_PER_EVENT = 100
MAX_QUEUED_EVENTS = 64
MAX_QUEUED_BYTES = 8 * 1024 * 1024
HIDDEN = "set, not shown"
LOCAL_STORES = ("memory", "off")


class Viewer:
    """One viewer's queue of events. A viewer that is too slow for its bounds is cut off."""

    def __init__(self) -> None:
        self._queue: deque[bytes] = deque()
        self._size = 0
        self._changed = asyncio.Event()
        self.is_cut_off = self.is_finished = False

    def put(self, event: bytes) -> None:
        """Add an event. A lone event may be of any size."""
        if self.is_cut_off:
            return
        self._queue.append(event)
        self._size += len(event)
        is_large = len(self._queue) > 1 and self._size > MAX_QUEUED_BYTES
        if is_large or len(self._queue) > MAX_QUEUED_EVENTS:
            self.cut_off()
        self._changed.set()

    def cut_off(self) -> None:
        """Send nothing more: the viewer is too slow, or the router stops."""
        self.is_cut_off = True
        self._queue.clear()
        self._size = 0
        self._changed.set()

    def finish(self) -> None:
        """Send what is queued, and nothing more."""
        self.is_finished = True
        self._changed.set()

    async def next(self, timeout: float) -> bytes:
        """Return all queued events; may be empty, after `timeout` seconds or when cut off."""
        if not self._queue and not self.is_cut_off and not self.is_finished:
            self._changed.clear()
            try:
                async with asyncio.timeout(timeout):
                    await self._changed.wait()
            except TimeoutError:
                return b""
        block = b"".join(self._queue)
        self._queue.clear()
        self._size = 0
        return block


class DashboardHub:
    """The viewers of this process, and the work for them.

    `source` makes this process's snapshots. `other_workers` is set where the router has several
    worker processes.
    """

    def __init__(self, gateway: Gateway, source: SnapshotSource) -> None:
        self._gateway = gateway
        self._started_at = time.time()
        self.source = source
        self.other_workers: OtherWorkers | None = None
        self._viewers: set[Viewer] = set()
        self._work: asyncio.Task[None] | None = None
        self._reset()

    def _reset(self) -> None:
        self._snapshot: Json = {}
        self._shown_settings = self._gateway.settings
        self._ended: deque[Json] = deque(maxlen=MAX_ENDED)
        self._matcher = TransferMatcher()

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    def unknown_request(self, request_id: str) -> str:
        """Return the error for a request id that this process does not know."""
        where = "" if self.other_workers is None else "this worker process of "
        return (
            f"{where}the router has no request {request_id[:100]!r} among the last {MAX_RECENT} "
            "that ended: the id is in the response header x-request-id and in the access log"
        )

    @contextlib.contextmanager
    def viewing(self) -> Iterator[Viewer]:
        """Add a viewer until the block ends."""
        viewer = Viewer()
        if self._work is None or self._work.done():
            self._snapshot = {}
            self._work = asyncio.get_running_loop().create_task(self._run())
        elif self._snapshot:  # otherwise the first update is to come, and goes to all viewers
            viewer.put(self._snapshot_event())
        self._viewers.add(viewer)
        try:
            yield viewer
        finally:
            self._viewers.discard(viewer)
            if not self._viewers:
                if self._work is not None:
                    self._work.cancel()
                self._work = None
                self._reset()

    async def _run(self) -> None:
        """Send updates until there is no viewer, the router stops, or an update fails."""
        try:
            with self.source.reading() as take_snapshot:
                await self._update_all(take_snapshot)
        except Exception:
            logger.exception("the dashboard cannot be updated")
        finally:
            if self._work is asyncio.current_task():  # otherwise these viewers are of a later task
                for viewer in self._viewers:
                    if not viewer.is_finished:
                        viewer.cut_off()

    async def _update_all(self, take_snapshot: Callable[[], ProcessSnapshot]) -> None:
        poller = EnginePoller(self._gateway.fleet)
        async with asyncio.TaskGroup() as group:
            helpers = [group.create_task(poller.run())]
            if self.other_workers is not None:
                helpers.append(group.create_task(self.other_workers.run()))
            self._update(take_snapshot(), poller)
            while not self._gateway.tasks.is_draining:
                await asyncio.sleep(UPDATE_INTERVAL_S)
                self._update(take_snapshot(), poller)
            for helper in helpers:
                helper.cancel()
        for viewer in self._viewers:
            viewer.finish()

    def _update(self, own: ProcessSnapshot, poller: EnginePoller) -> None:
        snapshots: list[ProcessSnapshot | None] = [own]
        ended, missed = own.ended, own.missed
        if self.other_workers is not None:
            snapshots += self.other_workers.snapshots()
            more, more_missed = self.other_workers.take_ended()
            ended = sorted([*ended, *more], key=lambda one: one.at)
            missed += more_missed
        missed += max(0, len(ended) - MAX_ENDED_PER_EVENT)
        ended = ended[-MAX_ENDED_PER_EVENT:]
        listed = [one.model_dump(mode="json") for one in ended]
        self._ended.extend(listed)
        self._matcher.expect(ended)
        found = self._matcher.take(poller.pages(), time.time() - now())
        moved = {key: one.model_dump(mode="json") for key, one in found.items()}
        for one in self._ended:
            if one["key"] in moved:
                one["moved"] = moved[one["key"]]
        before = self._snapshot
        self._snapshot = merge_snapshots(snapshots, poller.gauges(), poller.byte_rates())
        if not before or self._shown_settings is not self._gateway.settings:
            self._shown_settings = self._gateway.settings
            self._send(self._snapshot_event())
            return
        if listed:
            self._send(encode_event("ended", {"requests": listed, "untold": missed}))
        if moved:
            self._send(encode_event("moved", moved))
        if changed := changes(before, self._snapshot):
            self._send(encode_event("change", changed))

    def _send(self, event: bytes) -> None:
        for viewer in self._viewers:
            viewer.put(event)

    def _snapshot_event(self) -> bytes:
        settings = self._gateway.settings
        about = {
            "version": version("disagg-router"),
            "now": time.time(),
            "started_at": self._started_at,
            "docs": documentation_url(),
            "metrics_port": settings.metrics_port,
            "refusal_window": REFUSAL_WINDOW_S,
            "settings": visible_settings(settings),
            "ended": list(self._ended),
            "conversations": {"store": settings.conversation_store.partition("://")[0]},
            "ttl": settings.conversation_ttl,
        }
        return encode_event("snapshot", self._snapshot | about)


def encode_event(name: str, content: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), orjson.dumps(content))


def documentation_url() -> str:
    """Return the address of the documentation that the installed package names; empty if none."""
    links = (text.partition(", ") for text in metadata("disagg-router").get_all("Project-URL", []))
    return next((url for name, _, url in links if name.lower() == "documentation"), "")


def visible_settings(settings: Settings) -> list[Json]:
    """Return the settings in force; of a secret only whether it is set."""
    return [
        {
            "group": group_title(name),
            "flag": flag_of(name),
            "value": _setting_text(name, value := getattr(settings, name)),
            "is_default": value == field.default,
        }
        for name, field in Settings.model_fields.items()
    ]


def _setting_text(name: str, value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, SecretStr) or (name in SECRET_NAMES and value not in LOCAL_STORES):
        # A store's URL may have a password; its scheme names the kind of store.
        scheme, found, _ = value.partition("://") if isinstance(value, str) else ("", "", "")
        return f"{scheme}://… ({HIDDEN})" if found else HIDDEN
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value_text(value)} {unit_of(name)}".strip()
