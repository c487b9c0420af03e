"""Operators' changes: checked here, remembered here, and published to the router's processes.

There is one `Control` for all processes. Every question and every change publishes the whole state
and collects what each process sees once it has applied that state. So an answer shows the effect of
a change, and a process that missed a change catches up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from pydantic import BaseModel

from router.admin.processes import RELOADABLE, TUNABLE, DesiredState, Tunables
from router.auth.api_keys import Keyring
from router.fleet.engine import Intent
from router.fleet.registry import OVERRIDES_SOURCE, OperatorOverrides
from router.fleet.sources.file import address_of, parse_entry
from router.fleet.sources.source import SourceError
from router.fleet.views import (
    EngineView,
    FleetView,
    GroupView,
    has_all_listings,
    merge_engine_views,
    merge_group_views,
)
from router.openai.errors import OperatorError
from router.settings import Address, Settings, SettingsError, flag_of, is_loopback, read_secret
from router.telemetry import logs

logger = logging.getLogger("disagg_router.admin")
MAX_ADDED_ENGINES = 4096
MAX_GROUP_WEIGHTS = 1024
SETTINGS_READ_TIMEOUT_S = 5.0
DRAIN_CHECK_INTERVAL_S = 1.0
# Makes every process of the router apply the state, and returns what each one sees then. The view
# of a process that does not answer in time is None; it gets the state as soon as it answers.
Publish = Callable[[DesiredState], Awaitable[Sequence[FleetView | None]]]


class WorkerCounts(BaseModel):
    """How many processes the router has, and how many of them answered."""

    answered: int
    known: int


class EngineList(BaseModel):
    """All engines. While a process does not answer, no engine is `drained`."""

    engines: list[EngineView]
    workers: WorkerCounts


class ReloadResult(BaseModel):
    """Names of settings: those that changed now, and those that differ and need a restart."""

    applied: list[str]
    needs_restart: list[str]


class Control:
    """The operators' state of one router.

    `settings` are those that the router started with, and `read_again` loads them anew.
    `state` is what was published last; `token` is the admin token in force, None if there is none.
    Raises SettingsError for keys that cannot be read.
    """

    def __init__(
        self, settings: Settings, publish: Publish, read_again: Callable[[], Settings]
    ) -> None:
        self._started = settings
        self._publish = publish
        self._read_again = read_again
        self._keys = _store_keys(settings)
        self._lock = asyncio.Lock()
        self._reading: asyncio.Task[Settings] | None = None
        self._reloads: set[asyncio.Task[None]] = set()
        self.token = read_secret(settings, "admin_token")
        self.state = DesiredState(Tunables.of(settings))

    async def run(self) -> None:
        """Forget the drains of engines that are gone, again and again until cancelled."""
        while True:
            await asyncio.sleep(DRAIN_CHECK_INTERVAL_S)
            try:
                await self.forget_drains()
            except Exception:
                logger.exception("the admin API could not check the engines that drain")

    async def forget_drains(self) -> None:
        """Forget the drains of engines that have left every source."""
        if not self.state.overrides.draining:
            return
        async with self._lock:
            views = await self._publish(self.state)
            if not has_all_listings(views):
                return
            listed = {address_of(e.url) for e in merge_engine_views(views) if e.sources}
            overrides = self.state.overrides.pruned(listed)
            if overrides != self.state.overrides:
                await self._override(overrides)

    # Questions.

    async def engines(self) -> EngineList:
        views = await self._publish(self.state)
        answered = sum(view is not None for view in views)
        workers = WorkerCounts(answered=answered, known=len(views))
        return EngineList(engines=merge_engine_views(views), workers=workers)

    async def engine(self, name: str) -> EngineView:
        """Raises OperatorError."""
        return _find(name, (await self.engines()).engines)

    async def groups(self) -> list[GroupView]:
        return merge_group_views(await self._publish(self.state))

    # Changes. Each raises OperatorError.

    async def add(self, entry: object) -> EngineView:
        """Add an engine. `entry` has the form of an entry of the engines file."""
        try:
            spec = parse_entry(entry)
        except SourceError as error:
            raise OperatorError(400, str(error)) from None
        async with self._lock:
            for engine in await self._known():
                if engine.name == spec.name and engine.sources:
                    raise OperatorError(409, f"{spec.name} is {_listed_by(engine)} already")
            overrides = self.state.overrides.without_drain(spec.address)
            if overrides.adds(spec.address):
                raise OperatorError(409, f"{spec.name} is listed by {OVERRIDES_SOURCE} already")
            if len(overrides.added) >= MAX_ADDED_ENGINES:
                raise OperatorError(409, f"{MAX_ADDED_ENGINES} engines were added already")
            overrides = overrides.with_engine(replace(spec, intent=Intent.SERVING))
            if spec.intent is Intent.DRAINING:
                overrides = overrides.with_drain(spec.address)
            engines = await self._override(overrides)
        logger.info("engine %s added", spec.name)
        return _find(spec.name, engines)

    async def remove(self, name: str) -> None:
        """Remove an engine that `add` added. Its requests finish, as when a source drops it."""
        async with self._lock:
            engine = _find(name, await self._known())
            address = address_of(engine.url)
            if OVERRIDES_SOURCE not in engine.sources:
                listed = _listed_by(engine) if engine.sources else "not listed any more"
                raise OperatorError(
                    409, f"{engine.name} was not added by the admin API: it is {listed}"
                )
            overrides = self.state.overrides.without_engine(address)
            if engine.sources == [OVERRIDES_SOURCE]:
                overrides = overrides.without_drain(address)
            await self._override(overrides)
        logger.info("engine %s removed", engine.name)

    async def drain(self, name: str, migrates: bool = False) -> EngineView:
        """Send no new requests to an engine. `migrates`: its streams move to other engines."""
        step = partial(OperatorOverrides.with_drain, migrates=migrates)
        return await self._change(name, "drains", step)

    async def resume(self, name: str) -> EngineView:
        return await self._change(name, "serves again", OperatorOverrides.without_drain)

    async def weigh(self, group: str, weight: float) -> GroupView:
        async with self._lock:
            overrides = self.state.overrides.with_weight(group, weight)
            if len(overrides.weights) > MAX_GROUP_WEIGHTS:
                raise OperatorError(409, f"{MAX_GROUP_WEIGHTS} groups have a weight already")
            await self._known()
            await self._override(overrides)
        logger.info("group %s has weight %g", group, weight)
        return next(one for one in await self.groups() if one.name == group)

    async def unweigh(self, group: str) -> None:
        async with self._lock:
            if group not in self.state.overrides.weights:
                raise OperatorError(404, f"the admin API has set no weight for group {group}")
            await self._override(self.state.overrides.without_weight(group))
        logger.info("group %s has its configured weight again", group)

    async def reload(self) -> ReloadResult:
        """Read the settings again, and apply those that may change at run time.

        Raises SettingsError, and changes nothing, if the new settings cannot be used.
        """
        async with self._lock:
            settings = await self._read()
            await asyncio.to_thread(_check_api_keys, self._started.api_keys_file)
            token, keys = read_secret(settings, "admin_token"), _store_keys(settings)
            self._check(token, keys)
            old, new = self.state.tunables, Tunables.of(settings)
            applied = [name for name in TUNABLE if getattr(new, name) != getattr(old, name)]
            if keys != self._keys:
                self._keys, applied = keys, [*applied, "conversation_store_key"]
                text = tuple(key.decode() for key in keys)
                self.state = replace(self.state, store_keys=text)
            if token != self.token:
                self.token, applied = token, [*applied, "admin_token"]
            self.state = replace(self.state, tunables=new, reloads=self.state.reloads + 1)
            logs.set_level(new.log_level)
            await self._publish(self.state)
        late = [
            name
            for name in Settings.model_fields
            if getattr(settings, name) != getattr(self._started, name) and name not in RELOADABLE
        ]
        if applied:
            logger.info("settings changed: %s", " ".join(map(flag_of, applied)))
        else:
            logger.info("settings reloaded: no changes")
        if late:
            logger.warning("settings that need a restart: %s", " ".join(map(flag_of, late)))
        return ReloadResult(applied=applied, needs_restart=late)

    def reload_soon(self) -> None:
        """Reload in a task; for a signal handler on the event loop. At most one reload waits."""
        if len(self._reloads) > 1:
            return
        task = asyncio.get_running_loop().create_task(self._reload_and_log())
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    async def _reload_and_log(self) -> None:
        try:
            await self.reload()
        except SettingsError as error:
            logger.error("reload failed, settings are unchanged: %s", "; ".join(error.problems))
        except Exception:
            logger.exception("reload failed by an internal error, settings are unchanged")

    # Steps.

    async def _known(self) -> list[EngineView]:
        """Return all engines. Raises OperatorError where no process answers."""
        found = await self.engines()
        if not found.workers.answered:
            raise OperatorError(503, "no router process answers")
        return found.engines

    async def _override(self, overrides: OperatorOverrides) -> list[EngineView]:
        self.state = replace(self.state, overrides=overrides)
        return (await self.engines()).engines

    async def _change(
        self,
        name: str,
        effect: str,
        step: Callable[[OperatorOverrides, Address], OperatorOverrides],
    ) -> EngineView:
        async with self._lock:
            engine = _find(name, await self._known())
            overrides = step(self.state.overrides, address_of(engine.url))
            is_new = overrides != self.state.overrides
            engines = await self._override(overrides)
        if is_new:
            logger.info("engine %s %s", engine.name, effect)
        return _find(engine.name, engines)

    async def _read(self) -> Settings:
        """Read settings in a thread, since a file's disk may be slow, remote or gone."""
        if self._reading is not None and not self._reading.done():
            raise SettingsError(["settings are still being read for an earlier reload"])
        self._reading = asyncio.create_task(asyncio.to_thread(self._read_again))
        done, _ = await asyncio.wait([self._reading], timeout=SETTINGS_READ_TIMEOUT_S)
        if not done:
            raise SettingsError([f"settings cannot be read within {SETTINGS_READ_TIMEOUT_S:g} s"])
        return self._reading.result()

    def _check(self, token: str | None, keys: Sequence[bytes]) -> None:
        """Raises SettingsError for valid settings that this running router cannot take over."""
        host = self._started.admin_host
        problems = []
        if token is None and self._started.admin_port is not None and not is_loopback(host):
            problems.append(f"no admin token, and the admin API listens on {host}")
        if self._keys and not keys:
            problems.append("removing the conversation store key needs a restart")
        if problems:
            raise SettingsError(problems)


def _find(name: str, engines: Sequence[EngineView]) -> EngineView:
    """Find an engine by any spelling of its address. Raises OperatorError."""
    try:
        wanted = str(address_of(f"http://{name}"))
    except ValueError:
        wanted = name
    for engine in engines:
        if engine.name == wanted:
            return engine
    raise OperatorError(404, f"there is no engine {name[:300]}")


def _listed_by(engine: EngineView) -> str:
    return "listed by " + " and ".join(engine.sources)


def _store_keys(settings: Settings) -> tuple[bytes, ...]:
    """Return the keys that sign entries in a shared store. Raises SettingsError."""
    if settings.conversation_store in ("memory", "off"):
        return ()
    return tuple(settings.store_keys())


def _check_api_keys(path: Path | None) -> None:
    """Raises SettingsError to the caller of the reload; each process watches that file itself."""
    try:
        if path is not None:
            Keyring.check_file(path)
    except ValueError as error:
        raise SettingsError([f"--api-keys-file {path}: {error}"]) from None
