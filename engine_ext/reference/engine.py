"""The engine as its callers see it: an asyncio face in front of one thread that steps."""

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
from engine_ext.reference.core import EngineCore, StepResult
from engine_ext.reference.kv_connector import KVConnector
from engine_ext.reference.messages import EngineStats, GenerateRequest, RequestOutput
from engine_ext.reference.resume import Beginning
from engine_ext.worker.staging import StagingFactory


class OutputStream:
    """`put` and `get` belong to the loop's thread. What came while the consumer was busy is
    handed over as one output, so a slow consumer costs no more than the answer itself."""

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
    """From any thread: one wake-up per loop, however many streams have news."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Delivery]] = {}
    for stream, output in deliveries:
        by_loop.setdefault(stream.loop, []).append((stream, output))
    for loop, batch in by_loop.items():
        try:
            loop.call_soon_threadsafe(_put_all, batch)
        except RuntimeError:  # The loop is closed: nobody is left to read.
            continue


def merge(outputs: list[RequestOutput]) -> RequestOutput:
    """`outputs` of one request, in order, as one."""
    if len(outputs) == 1:
        return outputs[0]
    last = outputs[-1]
    return RequestOutput(
        request_id=last.request_id,
        text="".join(output.text for output in outputs),
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        logprobs=tuple(logprob for output in outputs for logprob in output.logprobs),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        kv_transfer_params=last.kv_transfer_params,
        num_cached_tokens=last.num_cached_tokens,
        error=last.error,
        load_failure=last.load_failure,
    )


def _put_all(batch: list[Delivery]) -> None:
    for stream, output in batch:
        stream.put(output)


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Submit:
    request: GenerateRequest
    stream: OutputStream
    begun: Beginning | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str
    stream: OutputStream | None = None
    """Only if the request is this stream's; None: whosever it is."""


@dataclass(frozen=True, slots=True)
class Call:
    """Run `function` between two steps."""

    function: Callable[[], Any]
    result: Future[Any]


Command = Submit | Abort | Call


class Inbox:
    """Unbounded, but every entry stands for a caller who waits, or who has just left."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._commands: deque[Command] = deque()
        self._woken = False
        self._closed = False

    def put(self, command: Command) -> bool:
        """False, and nothing is kept, once the inbox is closed."""
        with self._news:
            if self._closed:
                return False
            self._commands.append(command)
            self._news.notify()
            return True

    def wake(self) -> None:
        """From any thread, at any time."""
        with self._news:
            self._woken = True
            self._news.notify()

    def take(self, timeout: float) -> list[Command]:
        """All commands. Waits up to `timeout` seconds for a command or a wake."""
        with self._news:
            self._news.wait_for(lambda: self._woken or bool(self._commands), timeout)
            return self._drain()

    def close(self) -> list[Command]:
        """The last commands; none come after them."""
        with self._news:
            self._closed = True
            return self._drain()

    def _drain(self) -> list[Command]:
        self._woken = False
        commands = list(self._commands)
        self._commands.clear()
        return commands


_BACKSTOP = 1.0
"""Seconds after which an idle engine looks around although nobody woke it."""
_ASK_AGAIN = 0.01
"""Seconds until a waiting request is asked about again, when the connector wants that."""
_CALL_TIMEOUT = 30.0
_DRAIN_POLL = 0.02
_CHECK_INTERVAL = 10.0
"""Seconds between two checks of the bookkeeping; one costs milliseconds for a large cache."""
_GONE = "the engine is not running"


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
        self._inbox = Inbox()
        self._streams: dict[str, OutputStream] = {}
        self._stats = core.stats()
        self._stopping = threading.Event()
        self._failed = False
        self._unchecked = False
        """Something ran since the last check of the bookkeeping."""
        self._next_check = 0.0
        connector.worker.set_wake(self._inbox.wake)
        try:
            connector.start(regions, stage)
        except BaseException:
            connector.shutdown()
            raise
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def generate(
        self, request: GenerateRequest, begun: Beginning | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """The last output carries `finish_reason`; errors come that way too, nothing is raised.

        Closing the iterator, or cancelling its consumer, aborts the request; and where that comes
        before the last output was taken and done with, what was to be kept for others is not.
        `begun`: the answer goes on from there.
        """
        stream = OutputStream(asyncio.get_running_loop())
        if not self._inbox.put(Submit(request, stream, begun)):
            yield _error(request.request_id, _GONE)
            return
        answered = False
        try:
            while not answered:
                output = await stream.get()
                yield output
                answered = output.finish_reason is not None
        finally:
            if not answered:
                self._inbox.put(Abort(request.request_id, stream))

    def abort(self, request_id: str) -> None:
        """Its consumer gets a last output with finish_reason `abort`. One that has ended gives up
        what it keeps for a remote. Unknown ids are ignored."""
        self._inbox.put(Abort(request_id))

    def decline(self, params: dict[str, Any]) -> None:
        """A request with these `kv_transfer_params` was refused: a remote may hold blocks for it.
        Returns at once."""
        name = f"declined-{uuid.uuid4().hex}"
        self._inbox.put(Call(partial(self._core.decline, name, params), Future()))

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
        """Its thread ended by a fault of its own, not because it was told to."""
        return self._failed

    def check_integrity(self) -> None:
        """Between two steps. Raises IntegrityError, or TimeoutError after half a minute."""
        call = Call(self._core.check_integrity, Future())
        if self._inbox.put(call):
            call.result.result(_CALL_TIMEOUT)
        else:
            self._core.check_integrity()

    async def release(self, engine_id: str, request_id: str) -> bool:
        """No remote will read this request's KV. True: it was held."""
        call = Call(partial(self._core.release, engine_id, request_id), Future())
        if not self._inbox.put(call):
            return False
        async with asyncio.timeout(_CALL_TIMEOUT):
            return bool(await asyncio.wrap_future(call.result))

    def drain(self, timeout: float) -> bool:
        """Waits until no remote reader needs our blocks. Blocks; False after `timeout` seconds.

        Meant for an engine that takes no new requests any more.
        """
        deadline = time.monotonic() + timeout
        self._inbox.put(Call(self._core.drain, Future()))
        while self.is_healthy and not self._is_drained():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_DRAIN_POLL)
        return True

    def _is_drained(self) -> bool:
        stats = self._stats
        return not (stats.num_running or stats.num_waiting or stats.num_blocks_delayed)

    def shutdown(self, timeout: float = 10.0) -> None:
        """Aborts what runs, ends the thread, then the connector. Blocks; may be called again.

        Raises TimeoutError where the current step takes longer than `timeout` seconds; the
        connector is left alone then, as the step may use it.
        """
        self._stopping.set()
        self._inbox.wake()
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
            self._leave()

    def _step_until_stopped(self) -> None:
        timeout = 0.0
        while not self._stopping.is_set():
            deliveries = self._execute_all(self._inbox.take(timeout))
            timeout = _BACKSTOP
            if self._core.has_work or self._core.awaits_transfers:
                result = self._core.step()
                deliveries += self._address(result.outputs)
                timeout = _pause(result)
                self._unchecked = True
            elif self._unchecked and time.monotonic() >= self._next_check:
                self._check_integrity()
            self._stats = self._core.stats()
            deliver(deliveries)

    def _check_integrity(self) -> None:
        """Of an idle engine, now and then: an engine that lost count gives wrong answers."""
        self._core.check_integrity()
        self._unchecked = False
        self._next_check = time.monotonic() + _CHECK_INTERVAL

    def _leave(self) -> None:
        """Nobody who waits is left waiting."""
        commands = self._inbox.close()
        self._stats = self._core.stats()
        abandoned = [(c.request.request_id, c.stream) for c in commands if isinstance(c, Submit)]
        abandoned += self._streams.items()
        deliver([(stream, _error(request_id, _GONE)) for request_id, stream in abandoned])
        for command in commands:
            if isinstance(command, Call):
                command.result.set_exception(RuntimeError(_GONE))

    def _execute_all(self, commands: Iterable[Command]) -> list[Delivery]:
        return [delivery for command in commands for delivery in self._execute(command)]

    def _execute(self, command: Command) -> list[Delivery]:
        match command:
            case Submit(request, stream, begun):
                return self._submit(request, stream, begun)
            case Abort(request_id, stream):
                return self._abort(request_id, stream)
            case Call(function, result):
                _answer(function, result)
                return []

    def _submit(
        self, request: GenerateRequest, stream: OutputStream, begun: Beginning | None
    ) -> list[Delivery]:
        said = self._core.add(request, begun)
        if said is None or said.finish_reason is None:
            self._streams[request.request_id] = stream
        return [] if said is None else [(stream, said)]

    def _abort(self, request_id: str, stream: OutputStream | None) -> list[Delivery]:
        if stream is not None and self._streams.get(request_id, stream) is not stream:
            return []
        output = self._core.abort(request_id)
        return self._address([output] if output else [])

    def _address(self, outputs: Iterable[RequestOutput]) -> list[Delivery]:
        return [(self._stream_of(output), output) for output in outputs]

    def _stream_of(self, output: RequestOutput) -> OutputStream:
        if output.finish_reason is None:
            return self._streams[output.request_id]
        return self._streams.pop(output.request_id)


def _pause(result: StepResult) -> float:
    if result.progressed:
        return 0.0
    return _ASK_AGAIN if result.must_ask_again else _BACKSTOP


def _error(request_id: str, message: str) -> RequestOutput:
    return RequestOutput(request_id=request_id, finish_reason="error", error=message)


def _answer(function: Callable[[], Any], result: Future[Any]) -> None:
    try:
        result.set_result(function())
    except Exception as error:
        result.set_exception(error)
