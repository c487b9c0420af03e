"""The engine as its callers see it: an asyncio interface in front of one thread that steps.

Other threads put commands, which the engine's thread runs between two steps. Outputs return through
one `OutputStream` for each request, which belongs to its consumer's event loop.
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
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from engine_ext.common.inspection import Inspection
from engine_ext.common.types import ConnectorStats
from engine_ext.reference.answer import ResumedAnswer
from engine_ext.reference.core import EngineCore
from engine_ext.reference.messages import EngineStats, GenerateRequest, RequestOutput

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


class OutputStream:
    """One request's outputs, for one consumer, in its event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._outputs: asyncio.Queue[RequestOutput] = asyncio.Queue()
        self.get = self._outputs.get

    def put(self, output: RequestOutput) -> None:
        """From any thread."""
        with contextlib.suppress(RuntimeError):  # The loop is closed, so there is no reader.
            self._loop.call_soon_threadsafe(self._outputs.put_nowait, output)


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


class ReferenceEngine:
    """Owns the core, the thread that steps it and the connector, from construction to `shutdown`.

    All methods may be called from any thread; `generate` needs a running event loop.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._connector = core.connector
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        """None only wakes the thread."""
        self._lock = threading.Lock()
        self._has_ended = False
        """No step follows. Changes under the lock; commands look at it when they run."""
        self._streams: dict[str, OutputStream] = {}
        self._deliveries: list[tuple[OutputStream, RequestOutput]] = []
        """Outputs that are sent once `stats` includes them."""
        self._stats = core.stats()
        self._stopping = threading.Event()
        self.has_failed = False
        """Its thread ended by a fault of its own, not by `shutdown`."""
        self._connector.worker.set_wake(partial(self._commands.put, None))
        try:
            self._connector.start(core.cache.regions(), core.cache.stage)
        except BaseException:
            self._connector.shutdown()
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
        stream = OutputStream()
        self._put(partial(self._submit, request, stream, resumed))
        answered = False
        try:
            while not answered:
                output = await stream.get()
                yield output
                answered = output.finish_reason is not None
        finally:
            if not answered:
                self.abort(request.request_id)

    def abort(self, request_id: str) -> None:
        """Its consumer gets a last output with finish_reason `abort`. One that has ended gives up
        what it keeps for a remote. Unknown ids are ignored."""
        self._put(partial(self._abort, request_id))

    def decline(self, params: dict[str, Any]) -> None:
        """A request with these `kv_transfer_params` was refused: a remote may hold blocks for it.
        Returns at once."""
        self._call(partial(self._core.decline, f"declined-{uuid.uuid4().hex}", params))

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
    def step_model(self) -> dict[str, float] | None:
        """`step_model` of the identity page; None until fitted."""
        return self._core.step_fit.to_wire()

    @property
    def is_healthy(self) -> bool:
        return self._thread.is_alive() and not self.has_failed

    def check_integrity(self) -> None:
        """Between two steps. Raises IntegrityError, or TimeoutError after half a minute."""
        self._call(self._core.scheduler.check_integrity).result(CALL_TIMEOUT_S)

    async def release(self, engine_id: str, request_id: str) -> bool:
        """No remote will read this request's KV. True: it was held."""
        released = self._call(partial(self._core.scheduler.release, engine_id, request_id))
        async with asyncio.timeout(CALL_TIMEOUT_S):
            return await asyncio.wrap_future(released)

    def drain(self, timeout: float) -> bool:
        """Waits until no remote reader needs our blocks. Blocks; False after `timeout` seconds.

        Meant for an engine that takes no new requests any more.
        """
        deadline = time.monotonic() + timeout
        self._call(self._core.scheduler.drain)
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
        self._commands.put(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the engine's step did not end within {timeout:g} s")
        self._connector.shutdown()

    def _put(self, command: Callable[[], None]) -> None:
        """Run `command` between two steps, or at once if no step follows."""
        with self._lock:
            if not self._has_ended:
                self._commands.put(command)
                return
        command()

    def _call(self, function: Callable[[], T]) -> "Future[T]":
        """Run `function` between two steps, or at once if no step follows."""
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(function())
            except Exception as error:
                result.set_exception(error)

        self._put(run)
        return result

    def _take_commands(self, timeout: float) -> list[Callable[[], None]]:
        """All commands. Waits up to `timeout` seconds for one, or for a wake."""
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self._commands.get(timeout=timeout))
            while True:
                found.append(self._commands.get_nowait())
        return [command for command in found if command is not None]

    def _run(self) -> None:
        try:
            if (num_threads := self._core.config.num_threads) is not None:
                torch.set_num_threads(num_threads)
            self._step_until_stopped()
            self._address(self._core.abort_all())
            # The connector hears of the aborts, so that remote engines do.
            self._core.step()
            self._core.scheduler.check_integrity()
        except BaseException:  # The tokenizer's panics are not Exceptions.
            logger.exception("the engine's thread has failed")
            self.has_failed = True
        finally:
            # No caller waits for a thread that has ended.
            with self._lock:
                self._has_ended = True
            for command in self._take_commands(0.0):
                command()
            self._send()
            for request_id, stream in self._streams.items():
                stream.put(_not_running(request_id))

    def _step_until_stopped(self) -> None:
        timeout, is_unchecked, next_check = 0.0, False, 0.0
        while not self._stopping.is_set():
            for command in self._take_commands(timeout):
                command()
            timeout = IDLE_TIMEOUT_S
            if self._core.has_work:
                result = self._core.step()
                self._address(result.outputs)
                if result.progressed:
                    timeout = 0.0
                elif result.must_ask_again:
                    timeout = RETRY_INTERVAL_S
                is_unchecked = True
            elif is_unchecked and time.monotonic() >= next_check:
                # An engine with wrong bookkeeping gives wrong answers: it has to end.
                self._core.scheduler.check_integrity()
                is_unchecked, next_check = False, time.monotonic() + CHECK_INTERVAL_S
            self._send()

    def _submit(
        self, request: GenerateRequest, stream: OutputStream, resumed: ResumedAnswer | None
    ) -> None:
        if self._has_ended:
            stream.put(_not_running(request.request_id))
            return
        self._streams[request.request_id] = stream
        output = self._core.add(request, resumed)
        self._address([output] if output else [])

    def _abort(self, request_id: str) -> None:
        if not self._has_ended:
            output = self._core.abort(request_id)
            self._address([output] if output else [])

    def _address(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            is_last = output.finish_reason is not None
            take = self._streams.pop if is_last else self._streams.__getitem__
            self._deliveries.append((take(output.request_id), output))

    def _send(self) -> None:
        self._stats = self._core.stats()
        deliveries, self._deliveries = self._deliveries, []
        for stream, output in deliveries:
            stream.put(output)


def _not_running(request_id: str) -> RequestOutput:
    return RequestOutput(
        request_id=request_id, finish_reason="error", error="the engine is not running"
    )
