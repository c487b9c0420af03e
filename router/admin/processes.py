"""The state that operators want in every process of a router, and how each process gets it.

A state is one value, which is always sent whole. Without worker processes, the control applies it
here. With them, each worker connects once to a Unix socket in a private directory and keeps the
connection. The control sends a state as one line of JSON, the first one as soon as a worker
connects. The worker answers with one line: what it sees once it has applied the state. There are no
other messages, so a worker can be late with changes but cannot miss one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from router.common.watched_file import WatchedFiles
from router.conversations.store import SignedStore, ValueSigner
from router.fleet.registry import EngineRegistry, OperatorOverrides
from router.fleet.views import FleetView, build_fleet_view
from router.proxy.gateway import Gateway
from router.settings import Settings
from router.telemetry import logs

logger = logging.getLogger("disagg_router.admin")
STORE_KEY_SETTINGS = ("conversation_store_key", "conversation_store_key_file")
TOKEN_SETTINGS = ("admin_token", "admin_token_file")
ORDER_TIMEOUT_S = 2.0
# How long a worker that has just started waits for its first state before it serves without.
FIRST_STATE_TIMEOUT_S = 10.0
RECONNECT_DELAY_S = 0.2
MAX_ORDER_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Tunables:
    """The settings that processes take over at run time, with their names in Settings."""

    changing_prompt_lines: tuple[str, ...]
    group_weights: tuple[str, ...]
    log_level: str
    max_body_size: int
    max_connections: int
    max_engine_prefill_tokens: int
    max_engine_requests: int
    max_held_answers: int
    max_held_bodies: int
    queue_priorities: bool
    queue_size: int
    queue_timeout: float

    @classmethod
    def of(cls, settings: Settings) -> Tunables:
        return cls(**{name: getattr(settings, name) for name in TUNABLE})

    def over(self, settings: Settings) -> Settings:
        """Return settings with these values in place of their own."""
        return settings.model_copy(update=asdict(self))


TUNABLE = tuple(one.name for one in fields(Tunables))
RELOADABLE = frozenset((*TUNABLE, *STORE_KEY_SETTINGS, *TOKEN_SETTINGS))


@dataclass(frozen=True, slots=True)
class DesiredState:
    """The state that every process applies.

    `store_keys` sign entries in a shared conversation store; None for the keys that the process
    started with. `reloads` counts reloads: a process that sees it rise reads its watched files
    again at once.
    """

    tunables: Tunables
    overrides: OperatorOverrides = field(default_factory=OperatorOverrides)
    store_keys: tuple[str, ...] | None = None
    reloads: int = 0

    def to_json(self) -> bytes:
        """Return one line of JSON, without its end."""
        return _ADAPTER.dump_json(self)

    @staticmethod
    def from_json(raw: bytes) -> DesiredState:
        """Raises ValueError."""
        return _ADAPTER.validate_json(raw)


_ADAPTER = TypeAdapter(DesiredState)


@dataclass(slots=True)
class WorkerProcess:
    """This process, to which a state can be applied.

    `settings` are those that the router was built with, `store` is its signed conversation store if
    it has one, and `watched` are the files that it reloads, by name.
    """

    settings: Settings
    gateway: Gateway
    registry: EngineRegistry
    store: SignedStore | None
    watched: dict[str, WatchedFiles]
    _applied: DesiredState = field(init=False)

    def __post_init__(self) -> None:
        self._applied = DesiredState(Tunables.of(self.settings))

    def apply(self, state: DesiredState) -> FleetView:
        """Apply a state, and return what this process sees then. Idempotent."""
        before, fleet = self._applied, self.gateway.fleet
        settings = state.tunables.over(self.settings)
        if state.tunables != before.tunables:
            self.gateway.tune(settings)
            logs.set_level(settings.log_level)
        weights = {**settings.weights, **state.overrides.weights}
        if weights != fleet.group_weights:
            fleet.set_group_weights(weights)
        self.registry.set_overrides(state.overrides)
        self.gateway.migrating = frozenset(map(str, state.overrides.migrating))
        if state.store_keys and state.store_keys != before.store_keys and self.store is not None:
            self.store.use_signer(ValueSigner([key.encode() for key in state.store_keys]))
        if state.reloads != before.reloads:
            for file in self.watched.values():
                file.check_soon()
        self._applied = state
        return build_fleet_view(fleet, self.registry)

    async def publish(self, state: DesiredState) -> Sequence[FleetView | None]:
        """Apply a state as the only process of a router."""
        return [self.apply(state)]


class ControlChannel:
    """The control's connections to its worker processes, of which there should be `num_workers`."""

    def __init__(self, state: DesiredState, num_workers: int) -> None:
        self.state = state
        self._num_workers = num_workers
        self._workers: dict[WorkerConnection, asyncio.Task[Any]] = {}

    @contextlib.asynccontextmanager
    async def open(self, path: Path) -> AsyncIterator[None]:
        """Accept workers at a socket with this path, until the block ends."""
        server = await asyncio.start_unix_server(self._accept, path, limit=MAX_ORDER_BYTES)
        try:
            yield
        finally:
            server.close()
            tasks = list(self._workers.values())
            for worker in self._workers:
                worker.close()
            if tasks:
                await asyncio.wait(tasks, timeout=ORDER_TIMEOUT_S)

    async def publish(self, state: DesiredState) -> Sequence[FleetView | None]:
        self.state = state
        views = await asyncio.gather(*[worker.exchange(self) for worker in self._workers])
        answered = [view for view in views if view is not None]
        return [*answered, *[None] * (self._num_workers - len(answered))]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for other in self._workers:
            if other.reader.at_eof():
                other.close()
        task = asyncio.current_task()
        assert task is not None
        worker = WorkerConnection(reader, writer)
        # Before the first exchange: a state that is published meanwhile must reach it, too.
        self._workers[worker] = task
        try:
            await worker.exchange(self)
            await worker.is_over.wait()
        finally:
            self._workers.pop(worker, None)
            worker.close()


class WorkerConnection:
    """The control's connection to one worker, with one exchange at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer
        self._lock = asyncio.Lock()
        self.is_over = asyncio.Event()

    async def exchange(self, channel: ControlChannel) -> FleetView | None:
        """Send the channel's state, and return the worker's view.

        Without an answer in time the connection ends, since a late answer would be taken for that
        to the next state. The worker then connects again.
        """
        if self.is_over.is_set():
            return None
        try:
            async with asyncio.timeout(ORDER_TIMEOUT_S), self._lock:
                self._writer.write(channel.state.to_json() + b"\n")
                await self._writer.drain()
                return FleetView.model_validate_json(await self.reader.readuntil(b"\n"))
        except (TimeoutError, OSError, asyncio.IncompleteReadError, ValueError):
            self.is_over.set()
            return None

    def close(self) -> None:
        self.is_over.set()
        self._writer.transport.abort()


@contextlib.asynccontextmanager
async def follow_control(path: Path, process: WorkerProcess) -> AsyncIterator[None]:
    """Apply the states that the control at this socket publishes, until the block ends.

    The process has its first state when the block begins, unless the control is silent: that keeps
    no worker from serving.
    """
    has_state = asyncio.Event()
    task = asyncio.create_task(_follow(path, process, has_state))
    try:
        async with asyncio.timeout(FIRST_STATE_TIMEOUT_S):
            await has_state.wait()
    except TimeoutError:
        logger.error(
            "the worker control sent no state: serving without the changes of the admin API"
        )
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _follow(path: Path, process: WorkerProcess, has_state: asyncio.Event) -> None:
    while True:
        try:
            reader, writer = await asyncio.open_unix_connection(path, limit=MAX_ORDER_BYTES)
            with contextlib.closing(writer):
                while True:
                    state = DesiredState.from_json(await reader.readuntil(b"\n"))
                    view = process.apply(state)
                    has_state.set()
                    writer.write(view.model_dump_json().encode() + b"\n")
                    await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # the control is gone, or has closed this connection
        except (ValidationError, asyncio.LimitOverrunError) as error:
            logger.error("the worker control's state cannot be read: %s", error)
        except Exception:
            logger.exception("the worker control's state cannot be applied")
        await asyncio.sleep(RECONNECT_DELAY_S)
