"""The engine as its callers see it: an asyncio interface in front of one thread that steps.

Other threads send it `Command`s through the `CommandQueue`. Outputs return through one
`OutputStream` for each request, which belongs to its consumer's event loop.
"""

import asyncio
import contextlib
import logging
import queue
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from engine_ext.common.inspection import Inspection
from engine_ext.common.types import ConnectorStats, Region
from engine_ext.reference.core import EngineCore
from engine_ext.reference.kv_connector import KVConnector
from engine_ext.reference.messages import EngineStats, GenerateRequest, RequestOutput
from engine_ext.reference.resume import ResumedAnswer
from engine_ext.worker.staging import StagingFactory

logger = logging.getLogger(__name__)

T = TypeVar("T")

IDLE_TIMEOUT_S = 1.0
"""An idle engine steps after this time although nothing woke it."""
RETRY_INTERVAL_S = 0.01
"""Until the next step, when the connector could not answer yet for a waiting request."""
CALL_TIMEOUT_S = 30.0
DRAIN_POLL_S = 0.02
CHECK_INTERVAL_S = 10.0
"""Between two checks of the bookkeeping; one costs milliseconds for a large cache."""
_NOT_RUNNING = "the engine is not running"


class EngineEndedError(RuntimeError):
    """The engine's thread has ended."""


class OutputStream:
    """One request's outputs. `put` and `get` belong to the loop's thread. Outputs that come while
    the consumer is busy are merged into one, so a slow consumer needs no more memory than the
    answer itself."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._pending: list[RequestOutput] = []
        self._ready = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        self._pending.append(output)
        self._ready.set()

    async def get(self) -> RequestOutput:
        await self._ready.wait()
        self._ready.clear()
        outputs, self._pending = self._pending, []
        return merge(outputs)


Delivery = tuple[OutputStream, RequestOutput]


def deliver(deliveries: Iterable[Delivery]) -> None:
    """From any thread: one wake-up for each loop, however many streams have outputs."""

    def put_all(batch: list[Delivery]) -> None:
        for stream, output in batch:
            stream.put(output)

    by_loop: dict[asyncio.AbstractEventLoop, list[Delivery]] = {}
    for stream, output in deliveries:
        by_loop.setdefault(stream.loop, []).append((stream, output))
    for loop, batch in by_loop.items():
        try:
            loop.call_soon_threadsafe(put_all, batch)
        except RuntimeError:  # The loop is closed, so there is no reader.
            continue


def merge(outputs: list[RequestOutput]) -> RequestOutput:
    """`outputs` of one request, in order, as one."""
    if len(outputs) == 1:
        return outputs[0]
    return replace(
        outputs[-1],
        text="".join(output.text for output in outputs),
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        logprobs=tuple(logprob for output in outputs for logprob in output.logprobs),
    )


@dataclass(frozen=True, slots=True)
class Command:
    """To be run by the engine's thread between two steps, or failed if that has ended."""

    run: Callable[[], list[Delivery]]
    fail: Callable[[], None]


class CommandQueue:
    """Unbounded, but a caller waits, or has just left, for each command."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False

    def put(self, command: Command) -> bool:
        """False, and nothing is kept, once the queue is closed."""
        with self._lock:
            if not self._closed:
                self._commands.put(command)
            return not self._closed

    def wake(self) -> None:
        """End a `take` that waits. From any thread, at any time."""
        self._commands.put(None)

    def take(self, timeout: float) -> list[Command]:
        """All commands. Waits up to `timeout` seconds for a command or a wake."""
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self._commands.get(timeout=timeout))
            while True:
                found.append(self._commands.get_nowait())
        return [command for command in found if command is not None]

    def close(self) -> list[Command]:
        """The last commands."""
        with self._lock:
            self._closed = True
        return self.take(0.0)


class ReferenceEngine:
    """Owns the core, the thread that steps it and the connector, from construction to `shutdown`.

    All methods may be called from any thread; `generate` needs a running event loop.
    """

    def __init__(
        self,
        core: EngineCore,
        connector: KVConnector,
        regions: list[Region],
        stage: StagingFactory | None = None,
        *,
        num_threads: int | None = None,
    ) -> None:
        self._core = core
        self._connector = connector
        self._num_threads = num_threads
        self._commands = CommandQueue()
        self._streams: dict[str, OutputStream] = {}
        self._stats = core.stats()
        self._stopping = threading.Event()
        self._failed = False
        connector.worker.set_wake(self._commands.wake)
        try:
            connector.start(regions, stage)
        except BaseException:
            connector.shutdown()
            raise
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def generate(
        self, request: GenerateRequest, resumed: ResumedAnswer | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """The last output carries `finish_reason`; errors are outputs too, nothing is raised.

        Closing the iterator, or cancelling its consumer, aborts the request. If that happens before
        the consumer is done with the last output, the KV retained for other engines is given up.
        """
        stream = OutputStream(asyncio.get_running_loop())
        error = RequestOutput(
            request_id=request.request_id, finish_reason="error", error=_NOT_RUNNING
        )
        submit = partial(self._submit, request, stream, resumed)
        if not self._commands.put(Command(submit, lambda: deliver([(stream, error)]))):
            yield error
            return
        answered = False
        try:
            while not answered:
                output = await stream.get()
                yield output
                answered = output.finish_reason is not None
        finally:
            if not answered:
                self._put_abort(request.request_id, stream)

    def abort(self, request_id: str) -> None:
        """Its consumer gets a last output with finish_reason `abort`. One that has ended gives up
        what it keeps for a remote. Unknown ids are ignored."""
        self._put_abort(request_id)

    def decline(self, params: dict[str, Any]) -> None:
        """A request with these `kv_transfer_params` was refused: a remote may hold blocks for it.
        Returns at once."""
        name = f"declined-{uuid.uuid4().hex}"
        self._call(partial(self._core.decline, name, params))

    def stats(self) -> EngineStats:
        """As of the last step."""
        return self._stats

    def connector_stats(self) -> ConnectorStats:
        half = self._connector.scheduler
        return replace(
            self._connector.worker.stats(),
            proofs_unreadable=half.proofs_unreadable,
            engine_id_clashes=half.engine_id_clashes,
        )

    def inspect(self, asked: str | None = None) -> Inspection | None:
        """What is held for other engines. Blocks for a second at most; raises TimeoutError."""
        return self._connector.worker.inspect(asked)

    @property
    def is_healthy(self) -> bool:
        return self._thread.is_alive() and not self._failed

    @property
    def has_failed(self) -> bool:
        """Its thread ended by a fault of its own, not by `shutdown`."""
        return self._failed

    def check_integrity(self) -> None:
        """Between two steps. Raises IntegrityError, or TimeoutError after half a minute."""
        try:
            self._call(self._core.check_integrity).result(CALL_TIMEOUT_S)
        except EngineEndedError:
            self._core.check_integrity()

    async def release(self, engine_id: str, request_id: str) -> bool:
        """No remote will read this request's KV. True: it was held."""
        released = self._call(partial(self._core.release, engine_id, request_id))
        with contextlib.suppress(EngineEndedError):
            async with asyncio.timeout(CALL_TIMEOUT_S):
                return await asyncio.wrap_future(released)
        return False

    def drain(self, timeout: float) -> bool:
        """Waits until no remote reader needs our blocks. Blocks; False after `timeout` seconds.

        Meant for an engine that takes no new requests any more.
        """
        deadline = time.monotonic() + timeout
        self._call(self._core.drain)
        while self.is_healthy:
            stats = self._stats
            if not (stats.num_running or stats.num_waiting or stats.num_blocks_delayed):
                break
            if time.monotonic() >= deadline:
                return False
            time.sleep(DRAIN_POLL_S)
        return True

    def shutdown(self, timeout: float = 10.0) -> None:
        """Aborts what runs, ends the thread, then the connector. Blocks; may be called again.

        Raises TimeoutError if the current step takes longer than `timeout` seconds; the
        connector is left alone then, as the step may use it.
        """
        self._stopping.set()
        self._commands.wake()
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the engine's step did not end within {timeout:g} s")
        self._connector.shutdown()

    def _call(self, function: Callable[[], T]) -> "Future[T]":
        """Run `function` between two steps; EngineEndedError if there are no more."""
        result: Future[T] = Future()

        def run() -> list[Delivery]:
            try:
                result.set_result(function())
            except Exception as error:
                result.set_exception(error)
            return []

        def fail() -> None:
            result.set_exception(EngineEndedError(_NOT_RUNNING))

        if not self._commands.put(Command(run, fail)):
            fail()
        return result

    def _put_abort(self, request_id: str, owner: OutputStream | None = None) -> None:
        """With an `owner`, only if the request belongs to that stream."""
        self._commands.put(Command(partial(self._abort, request_id, owner), lambda: None))

    def _run(self) -> None:
        try:
            if self._num_threads is not None:
                torch.set_num_threads(self._num_threads)
            self._step_until_stopped()
            deliver(self._address(self._core.abort_all()))
            # The connector hears of the aborts, so that remote engines do.
            self._core.step()
            self._core.check_integrity()
        except BaseException:  # The tokenizer's panics are not Exceptions.
            logger.exception("the engine's thread has failed")
            self._failed = True
        finally:
            self._end_all_waiting()

    def _step_until_stopped(self) -> None:
        timeout, is_unchecked, next_check = 0.0, False, 0.0
        while not self._stopping.is_set():
            commands = self._commands.take(timeout)
            deliveries = [each for command in commands for each in command.run()]
            timeout = IDLE_TIMEOUT_S
            if self._core.has_work or self._core.awaits_transfers:
                result = self._core.step()
                deliveries += self._address(result.outputs)
                if result.progressed:
                    timeout = 0.0
                elif result.must_ask_again:
                    timeout = RETRY_INTERVAL_S
                is_unchecked = True
            elif is_unchecked and time.monotonic() >= next_check:
                # An engine with wrong bookkeeping gives wrong answers: it has to end.
                self._core.check_integrity()
                is_unchecked, next_check = False, time.monotonic() + CHECK_INTERVAL_S
            self._stats = self._core.stats()
            deliver(deliveries)

    def _submit(
        self, request: GenerateRequest, stream: OutputStream, resumed: ResumedAnswer | None
    ) -> list[Delivery]:
        output = self._core.add(request, resumed)
        if output is None or output.finish_reason is None:
            self._streams[request.request_id] = stream
        return [] if output is None else [(stream, output)]

    def _abort(self, request_id: str, owner: OutputStream | None) -> list[Delivery]:
        if owner is not None and self._streams.get(request_id, owner) is not owner:
            return []
        output = self._core.abort(request_id)
        return self._address([output] if output else [])

    def _address(self, outputs: Iterable[RequestOutput]) -> list[Delivery]:
        deliveries = []
        for output in outputs:
            is_last = output.finish_reason is not None
            take = self._streams.pop if is_last else self._streams.__getitem__
            deliveries.append((take(output.request_id), output))
        return deliveries

    def _end_all_waiting(self) -> None:
        """No caller waits for a thread that has ended."""
        for command in self._commands.close():
            command.fail()
        self._stats = self._core.stats()
        for request_id, stream in self._streams.items():
            error = RequestOutput(request_id=request_id, finish_reason="error", error=_NOT_RUNNING)
            deliver([(stream, error)])
