"""Where operators' wishes are kept, checked, and told to the processes of a router.

There is one for all processes. Whatever it is asked, it tells the whole state and hears what each
process sees then: so an answer shows what has come of a command, and who has missed one has it now.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from router.admin.desired_state import RELOADABLE, TUNABLE, DesiredState, Tunables, changed
from router.auth.api_keys import Keyring
from router.fleet.engine_spec import Intent
from router.fleet.overrides import OVERRIDES_SOURCE, OperatorOverrides
from router.fleet.sources.file import address_of, listed_in
from router.fleet.sources.source import SourceError
from router.fleet.views import (
    EngineView,
    FleetView,
    GroupView,
    is_informed,
    merge_engine_views,
    merge_group_views,
)
from router.settings import Address, Settings, SettingsError, flag_of, is_loopback
from router.telemetry import logs

logger = logging.getLogger("disagg_router.admin")
MOST_ADDED = 4096
MOST_WEIGHTS = 1024
# Seconds to read settings, and between two looks at whether engines that drain are still listed.
PATIENCE = 5.0
LOOK = 1.0


class WorkerProcesses(Protocol):
    async def tell(self, state: DesiredState) -> Sequence[FleetView | None]:
        """What each process sees when it has taken over the state; None for one that does not
        answer in time, and will be told when it does."""


class AdminRequestError(Exception):
    """What was asked for cannot be done; the message says why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class EngineListing(NamedTuple):
    engines: list[EngineView]
    answered: int
    known: int


class Reloaded(NamedTuple):
    """Names of settings: those that are new from now on, those that will be after a restart."""

    applied: list[str]
    needs_restart: list[str]


class Control:
    """`settings` as they were loaded, `read_again` loads them anew. Raises SettingsError."""

    def __init__(
        self, settings: Settings, processes: WorkerProcesses, read_again: Callable[[], Settings]
    ) -> None:
        self._started = settings
        self._processes = processes
        self._read_again = read_again
        self._keys = _keys_of(settings)
        self._lock = asyncio.Lock()
        self._reading: asyncio.Task[Settings] | None = None
        self._reloads: set[asyncio.Task[None]] = set()
        self.token = settings.admin_secret()
        self.state = DesiredState(Tunables.of(settings))

    async def run(self) -> None:
        """Forgets the drains of engines that are gone; ends only when it is cancelled."""
        while True:
            await asyncio.sleep(LOOK)
            try:
                await self.tidy()
            except Exception:
                logger.exception("the admin API could not look at engines that drain")

    # Questions.

    async def engines(self) -> EngineListing:
        views = await self._processes.tell(self.state)
        return EngineListing(
            merge_engine_views(views), sum(view is not None for view in views), len(views)
        )

    async def engine(self, name: str) -> EngineView:
        """Raises AdminRequestError."""
        return _find(name, (await self.engines()).engines)

    async def groups(self) -> list[GroupView]:
        return merge_group_views(await self._processes.tell(self.state))

    # Commands. Each raises AdminRequestError.

    async def add(self, entry: object) -> EngineView:
        """`entry` as in the engines file."""
        try:
            spec, intent = (listed := listed_in(entry)).spec, listed.intent
        except SourceError as error:
            raise AdminRequestError(400, str(error)) from None
        async with self._lock:
            for engine in await self._known():
                if engine.name == spec.name and engine.sources:
                    raise AdminRequestError(
                        409, f"{spec.name} is listed by {_named(engine)} already"
                    )
            overrides = self.state.overrides.without_drain(spec.address)
            if overrides.adds(spec.address):
                raise AdminRequestError(409, f"{spec.name} is listed by {OVERRIDES_SOURCE} already")
            if len(overrides.added) >= MOST_ADDED:
                raise AdminRequestError(409, f"{MOST_ADDED} engines were added already, no more")
            overrides = overrides.with_engine(spec)
            if intent is Intent.DRAINING:
                overrides = overrides.with_drain(spec.address)
            engines = await self._impose(overrides)
        logger.info("engine %s is added", spec.name)
        return _find(spec.name, engines)

    async def remove(self, name: str) -> None:
        """It leaves as one that a source does not list any more."""
        async with self._lock:
            engine = _find(name, await self._known())
            address = address_of(engine.url)
            if OVERRIDES_SOURCE not in engine.sources:
                whose = f"by {_named(engine)}" if engine.sources else "by nobody any more"
                raise AdminRequestError(
                    409, f"{engine.name} was not added here: it is listed {whose}"
                )
            overrides = self.state.overrides.without_engine(address)
            if engine.sources == [OVERRIDES_SOURCE]:
                overrides = overrides.without_drain(address)
            await self._impose(overrides)
        logger.info("engine %s is taken away", engine.name)

    async def drain(self, name: str) -> EngineView:
        return await self._change(name, "is to drain", OperatorOverrides.with_drain)

    async def resume(self, name: str) -> EngineView:
        return await self._change(name, "is not to drain any more", OperatorOverrides.without_drain)

    async def weigh(self, group: str, weight: float) -> GroupView:
        async with self._lock:
            overrides = self.state.overrides.with_weight(group, weight)
            if len(overrides.weights) > MOST_WEIGHTS:
                raise AdminRequestError(
                    409, f"{MOST_WEIGHTS} groups have a weight already, no more"
                )
            await self._known()
            await self._impose(overrides)
        logger.info("group %s has weight %g", group, weight)
        return next(one for one in await self.groups() if one.name == group)

    async def unweigh(self, group: str) -> None:
        async with self._lock:
            if group not in self.state.overrides.weights:
                raise AdminRequestError(404, f"group {group} was given no weight here")
            await self._impose(self.state.overrides.without_weight(group))
        logger.info("group %s has no weight of its own any more", group)

    async def reload(self) -> Reloaded:
        """Raises SettingsError, too; then everything stays as it is."""
        async with self._lock:
            settings = await self._read()
            await asyncio.to_thread(_check_api_keys, self._started)
            token, keys = settings.admin_secret(), _keys_of(settings)
            self._check(token, keys)
            tunables = Tunables.of(settings)
            applied = [n for n in TUNABLE if getattr(tunables, n) != self._tuned(n)]
            if keys != self._keys:
                self._keys, applied = keys, [*applied, "conversation_store_key"]
                text = tuple(key.decode() for key in keys)
                self.state = replace(self.state, store_keys=text)
            if token != self.token:
                self.token, applied = token, [*applied, "admin_token"]
            reloads = self.state.reloads + 1
            self.state = replace(self.state, tunables=tunables, reloads=reloads)
            logs.set_level(tunables.log_level)
            await self._processes.tell(self.state)
        late = [n for n in changed(self._started, settings) if n not in RELOADABLE]
        return _told(Reloaded(applied, late))

    def reload_soon(self) -> None:
        """For a signal's handler, on the loop. One that runs and one that waits are enough."""
        if len(self._reloads) > 1:
            return
        task = asyncio.get_running_loop().create_task(self._reload_and_log())
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    async def _reload_and_log(self) -> None:
        try:
            await self.reload()
        except SettingsError as error:
            logger.error("settings stay as they are: %s", "; ".join(error.problems))
        except Exception:
            logger.exception("settings stay as they are, by a fault of ours")

    async def tidy(self) -> None:
        if not self.state.overrides.draining:
            return
        async with self._lock:
            views = await self._processes.tell(self.state)
            if not is_informed(views):
                return
            listed = {address_of(e.url) for e in merge_engine_views(views) if e.sources}
            overrides = self.state.overrides.pruned(listed)
            if overrides != self.state.overrides:
                await self._impose(overrides)

    # Steps.

    async def _known(self) -> list[EngineView]:
        """Raises AdminRequestError where no process answers."""
        seen = await self.engines()
        if not seen.answered:
            raise AdminRequestError(503, "no process of the router answers")
        return seen.engines

    async def _impose(self, overrides: OperatorOverrides) -> list[EngineView]:
        self.state = replace(self.state, overrides=overrides)
        return (await self.engines()).engines

    async def _change(
        self, name: str, what: str, step: Callable[[OperatorOverrides, Address], OperatorOverrides]
    ) -> EngineView:
        async with self._lock:
            engine = _find(name, await self._known())
            overrides = step(self.state.overrides, address_of(engine.url))
            is_new = overrides != self.state.overrides
            engines = await self._impose(overrides)
        if is_new:
            logger.info("engine %s %s", engine.name, what)
        return _find(engine.name, engines)

    async def _read(self) -> Settings:
        """In a thread: a file's disk may be slow, or far away and gone."""
        if self._reading is not None and not self._reading.done():
            raise SettingsError(["settings are still being read for an earlier reload"])
        self._reading = asyncio.create_task(asyncio.to_thread(self._read_again))
        done, _ = await asyncio.wait([self._reading], timeout=PATIENCE)
        if not done:
            raise SettingsError([f"settings cannot be read within {PATIENCE:g} s"])
        return self._reading.result()

    def _check(self, token: str | None, keys: Sequence[bytes]) -> None:
        """Raises SettingsError for what is right by itself, and not for this router as it runs."""
        host = self._started.admin_host
        problems = []
        if token is None and self._started.admin_port is not None and not is_loopback(host):
            problems.append(f"no admin token, and the admin API listens on {host}")
        if self._keys and not keys:
            problems.append("no conversation store key any more: that needs a restart")
        if problems:
            raise SettingsError(problems)

    def _tuned(self, name: str) -> object:
        return getattr(self.state.tunables, name)


def _find(name: str, engines: Sequence[EngineView]) -> EngineView:
    """By any spelling of its address. Raises AdminRequestError."""
    try:
        wanted = str(address_of(f"http://{name}"))
    except ValueError:
        wanted = name
    for engine in engines:
        if engine.name == wanted:
            return engine
    raise AdminRequestError(404, f"there is no engine {name[:300]}")


def _named(engine: EngineView) -> str:
    return " and ".join(engine.sources)


def _keys_of(settings: Settings) -> tuple[bytes, ...]:
    """Those that turns in a shared store are signed with. Raises SettingsError."""
    if settings.conversation_store in ("memory", "off"):
        return ()
    return tuple(settings.store_keys())


def _check_api_keys(settings: Settings) -> None:
    """Processes watch the file by themselves; who reloads is to hear at once that it is broken.
    Raises SettingsError."""
    path = settings.api_keys_file
    if path is not None:
        try:
            Keyring.check_file(path)
        except ValueError as error:
            raise SettingsError([f"--api-keys-file {path}: {error}"]) from None


def _told(reloaded: Reloaded) -> Reloaded:
    if reloaded.applied:
        logger.info("settings changed: %s", " ".join(map(flag_of, reloaded.applied)))
    else:
        logger.info("settings were read again: nothing to change")
    if reloaded.needs_restart:
        flags = " ".join(map(flag_of, reloaded.needs_restart))
        logger.warning("settings that need a restart: %s", flags)
    return reloaded
