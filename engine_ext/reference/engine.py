"""The engine as its callers see it: an asyncio interface in front of one thread that steps.

Other threads send `Command`s through the `CommandQueue`; outputs return through one `OutputStream`
for each request, which belongs to its consumer's event loop.
"""

import asyncio
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from engine_ext.common.inspection import Inspection
from engine_ext.common.types import ConnectorStats, Region
from engine_ext.reference.core import EngineCore
from engine_ext.reference.kv_connector import KVConnector
from engine_ext.reference.messages import EngineStats, GenerateRequest, RequestOutput
from engine_ext.reference.resume import ResumedAnswer
from engine_ext.worker.staging import StagingFactory

logger = logging.getLogger(__name__)

IDLE_TIMEOUT_S = 1.0
"""An idle engine steps after this time although nothing woke it."""
RETRY_INTERVAL_S = 0.01
"""Until the next step, when the connector could not answer yet for a waiting request."""
CALL_TIMEOUT_S = 30.0
DRAIN_POLL_S = 0.02
CHECK_INTERVAL_S = 10.0
"""Between two checks of the bookkeeping; one costs milliseconds for a large cache."""
_NOT_RUNNING = "the engine is not running"


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
class Submit:
    request: GenerateRequest
    stream: OutputStream
    resumed: ResumedAnswer | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str
    stream: OutputStream | None = None
    """Only if the request belongs to this stream; None: in any case."""


@dataclass(frozen=True, slots=True)
class Call:
    """Run `function` between two steps."""

    function: Callable[[], Any]
    result: Future[Any]


Command = Submit | Abort | Call


class CommandQueue:
    """Unbounded, but a caller waits, or has just left, for each entry."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._commands: deque[Command] = deque()
        self._woken = False
        self._closed = False

    def put(self, command: Command) -> bool:
        """False, and nothing is kept, once the queue is closed."""
        with self._changed:
            if self._closed:
                return False
            self._commands.append(command)
            self._changed.notify()
            return True

    def wake(self) -> None:
        """From any thread, at any time."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def take(self, timeout: float) -> list[Command]:
        """All commands. Waits up to `timeout` seconds for a command or a wake."""
        with self._changed:
            self._changed.wait_for(lambda: self._woken or bool(self._commands), timeout)
            return self._take_all()

    def close(self) -> list[Command]:
        """The last commands."""
        with self._changed:
            self._closed = True
            return self._take_all()

    def _take_all(self) -> list[Command]:
        self._woken = False
        commands = list(self._commands)
        self._commands.clear()
        return commands


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
        prepare_thread: Callable[[], None] = lambda: None,
    ) -> None:
        self._core = core
        self._connector = connector
        self._regions = regions
        self._prepare_thread = prepare_thread
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
        if not self._commands.put(Submit(request, stream, resumed)):
            yield _error(request.request_id, _NOT_RUNNING)
            return
        answered = False
        try:
            while not answered:
                output = await stream.get()
                yield output
                answered = output.finish_reason is not None
        finally:
            if not answered:
                self._commands.put(Abort(request.request_id, stream))

    def abort(self, request_id: str) -> None:
        """Its consumer gets a last output with finish_reason `abort`. One that has ended gives up
        what it keeps for a remote. Unknown ids are ignored."""
        self._commands.put(Abort(request_id))

    def decline(self, params: dict[str, Any]) -> None:
        """A request with these `kv_transfer_params` was refused: a remote may hold blocks for it.
        Returns at once."""
        name = f"declined-{uuid.uuid4().hex}"
        self._commands.put(Call(partial(self._core.decline, name, params), Future()))

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

    def regions(self) -> list[Region]:
        return self._regions

    @property
    def is_healthy(self) -> bool:
        return self._thread.is_alive() and not self._failed

    @property
    def has_failed(self) -> bool:
        """Its thread ended by a fault of its own, not by `shutdown`."""
        return self._failed

    def check_integrity(self) -> None:
        """Between two steps. Raises IntegrityError, or TimeoutError after half a minute."""
        call = Call(self._core.check_integrity, Future())
        if self._commands.put(call):
            call.result.result(CALL_TIMEOUT_S)
        else:
            self._core.check_integrity()

    async def release(self, engine_id: str, request_id: str) -> bool:
        """No remote will read this request's KV. True: it was held."""
        call = Call(partial(self._core.release, engine_id, request_id), Future())
        if not self._commands.put(call):
            return False
        async with asyncio.timeout(CALL_TIMEOUT_S):
            return bool(await asyncio.wrap_future(call.result))

    def drain(self, timeout: float) -> bool:
        """Waits until no remote reader needs our blocks. Blocks; False after `timeout` seconds.

        Meant for an engine that takes no new requests any more.
        """
        deadline = time.monotonic() + timeout
        self._commands.put(Call(self._core.drain, Future()))
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

    def _run(self) -> None:
        try:
            self._prepare_thread()
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
            deliveries = [each for command in commands for each in self._execute(command)]
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

    def _execute(self, command: Command) -> list[Delivery]:
        match command:
            case Submit(request, stream, resumed):
                output = self._core.add(request, resumed)
                if output is None or output.finish_reason is None:
                    self._streams[request.request_id] = stream
                return [] if output is None else [(stream, output)]
            case Abort(request_id, owner):
                if owner is not None and self._streams.get(request_id, owner) is not owner:
                    return []
                output = self._core.abort(request_id)
                return self._address([output] if output else [])
            case Call(function, result):
                try:
                    result.set_result(function())
                except Exception as error:
                    result.set_exception(error)
                return []

    def _address(self, outputs: Iterable[RequestOutput]) -> list[Delivery]:
        deliveries = []
        for output in outputs:
            is_last = output.finish_reason is not None
            take = self._streams.pop if is_last else self._streams.__getitem__
            deliveries.append((take(output.request_id), output))
        return deliveries

    def _end_all_waiting(self) -> None:
        """No caller waits for a thread that has ended."""
        commands = self._commands.close()
        self._stats = self._core.stats()
        abandoned = [(c.request.request_id, c.stream) for c in commands if isinstance(c, Submit)]
        abandoned += self._streams.items()
        deliver([(stream, _error(name, _NOT_RUNNING)) for name, stream in abandoned])
        for command in commands:
            if isinstance(command, Call):
                command.result.set_exception(RuntimeError(_NOT_RUNNING))


def _error(request_id: str, message: str) -> RequestOutput:
    return RequestOutput(request_id=request_id, finish_reason="error", error=message)
