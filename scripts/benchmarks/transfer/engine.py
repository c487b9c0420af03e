"""The connector over some memory in a process of its own, driven as an engine drives it."""

from __future__ import annotations

import multiprocessing
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, Self, TypeVar

import numpy as np
import numpy.typing as npt

from engine_ext.common.config import ConnectorConfig, TransferMode
from engine_ext.common.prefix_hashes import Keys
from engine_ext.common.types import (
    CacheGeometry,
    EngineIdentity,
    FinishStatus,
    Region,
    TransferResults,
)
from engine_ext.connector import Connector, build_worker
from engine_ext.scheduler.scheduler import SchedulerConnector
from engine_ext.wire.errors import CONNECTOR_VERSION
from engine_ext.worker.agent import Agent
from engine_ext.worker.worker import open_nixl
from scripts.benchmarks.common import BenchError, free_ports
from scripts.benchmarks.transfer.memory import Memory, Shape

BLOCK_SIZE = 16
"""Tokens per block; only the sizes of prompts follow from it."""
REPORT_TIMEOUT_S = 120.0
CALL_TIMEOUT_S = 300.0

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


class Actor(Generic[T]):
    """`Actor(Thing, argument)` makes a Thing elsewhere; `actor.call(Thing.method, argument)`.

    Processes come from a fork server that has imported NIXL, which takes seconds.
    """

    def __init__(self, make: Callable[..., T], *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["scripts.benchmarks.transfer.sections"])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()
        self.collect()

    def call(self, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a method and return its answer. Raises BenchError."""
        self.begin(method, *args, **kwargs)
        answer: R = self.collect()
        return answer

    def begin(
        self, method: Callable[Concatenate[T, P], Any], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Call a method, whose answer `collect` returns. Raises BenchError."""
        try:
            self._pipe.send((method, args, kwargs))
        except OSError as error:
            raise BenchError(f"the process is gone: {error}") from None

    def collect(self) -> Any:
        try:
            if not self._pipe.poll(CALL_TIMEOUT_S):
                raise BenchError(f"no answer within {CALL_TIMEOUT_S:g} s")
            is_answer, answer = self._pipe.recv()
        except (EOFError, OSError):
            raise BenchError("the process is gone") from None
        if not is_answer:
            raise BenchError(answer)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pipe.close()
        self._process.join(timeout=20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(timeout=10)


def _serve(pipe: Connection[Any, Any], make: Callable[..., Any], arguments: tuple[Any]) -> None:
    """Serve until the other end closes; then call the object's `close`, if it has one."""
    thing: Any = None
    try:
        thing = make(*arguments)
        pipe.send((True, None))
        while True:
            method, args, kwargs = pipe.recv()
            pipe.send((True, method(thing, *args, **kwargs)))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass
    except Exception:
        pipe.send((False, traceback.format_exc()))
    finally:
        if hasattr(thing, "close"):
            thing.close()


@dataclass(frozen=True, slots=True)
class EngineSpec:
    name: str
    port: int
    shape: Shape
    device: str = "cpu"
    mode: TransferMode = "pull"
    lease_seconds: float = 600.0
    checksums: bool = False


def both_sides(shape: Shape, device: str, **more: Any) -> tuple[EngineSpec, EngineSpec]:
    """Return the specs of P and D, at free ports."""
    port_p, port_d = free_ports(2)
    p = EngineSpec("bench-p", port_p, shape, device, **more)
    return p, EngineSpec("bench-d", port_d, shape, device, **more)


@dataclass(slots=True)
class BenchRequest:
    """The least that an engine's request can be."""

    request_id: str
    kv_transfer_params: Any
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    content_keys: Keys = ()
    prompt_token_ids: Sequence[int] = field(init=False)
    token_ids: Sequence[int] = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_token_ids = self.token_ids = list(range(self.num_prompt_tokens))


class Granted(NamedTuple):
    """P has finished a prefill: its answer, and a monotonic time."""

    params: dict[str, Any]
    last_token_at: float


class Loaded(NamedTuple):
    """D may compute its first token. Times are monotonic, the same in all processes."""

    ordered_at: float
    loaded_at: float

    @property
    def seconds(self) -> float:
        """From the order to the report that wakes the engine."""
        return self.loaded_at - self.ordered_at


def make_connector(
    spec: EngineSpec, open_agent: Callable[[Sequence[Region], ConnectorConfig], Agent] = open_nixl
) -> Connector:
    """Return what `build_connector` builds, with another way to open NIXL."""
    factors = {
        "model": "bench",
        "connector_version": str(CONNECTOR_VERSION),
        "transfer_mode": spec.mode,
    }
    config = ConnectorConfig(
        engine_id=spec.name,
        transfer_mode=spec.mode,
        lease_duration=spec.lease_seconds,
        checksums=spec.checksums,
    )
    geometry = CacheGeometry(BLOCK_SIZE, spec.shape.blocks)
    identity = EngineIdentity(spec.name, "127.0.0.1", spec.port, compat_factors=factors)
    return Connector(
        SchedulerConnector(config, identity, geometry),
        build_worker(config, geometry, identity, open_agent),
    )


class BenchEngine:
    def __init__(self, spec: EngineSpec) -> None:
        self.memory = Memory(spec.shape, spec.device)
        self.regions = self.memory.regions()
        self.connector = make_connector(spec)
        self._report = threading.Event()
        self.connector.worker.set_wake(self._report.set)
        self.connector.start(self.regions)

    def marks(self, block_ids: Sequence[int]) -> npt.NDArray[np.int64]:
        return self.memory.marks(block_ids)

    def prefill(self, request_id: str, block_ids: Sequence[int]) -> Granted:
        """End a prefill whose KV is in these blocks."""
        num_tokens = len(block_ids) * BLOCK_SIZE
        request = BenchRequest(request_id, {"do_remote_decode": True}, num_tokens, num_tokens)
        scheduler = self.connector.scheduler
        scheduler.on_new_request(request)
        self.step()
        last_token_at = time.monotonic()
        answer = scheduler.request_finished(
            request, (tuple(block_ids),), FinishStatus.LENGTH_CAPPED
        )
        self.step()
        if answer.kv_transfer_params is None:
            raise BenchError("the prefill was not leased")
        return Granted(answer.kv_transfer_params, last_token_at)

    def load(self, request_id: str, params: dict[str, Any], block_ids: Sequence[int]) -> Loaded:
        """Take one request from its arrival to its KV."""
        request = BenchRequest(request_id, params, len(block_ids) * BLOCK_SIZE)
        scheduler = self.connector.scheduler
        scheduler.on_new_request(request)
        missing, _ = scheduler.get_num_new_matched_tokens(request, 0)
        if missing != request.num_prompt_tokens:
            raise BenchError(f"{missing} of {request.num_prompt_tokens} tokens can be loaded")
        ordered_at = time.monotonic()
        scheduler.update_state_after_alloc(request, (tuple(block_ids),), missing)
        self.step()
        results = self._result_of(request_id)
        loaded_at = time.monotonic()
        if request_id in results.failed_recving:
            raise BenchError(f"the load of {request_id} failed")
        scheduler.request_finished(request, ((),), FinishStatus.ABORTED)
        self.step()
        return Loaded(ordered_at, loaded_at)

    def step(self) -> None:
        self.connector.worker.start_load_kv(self.connector.scheduler.build_connector_meta())

    def drain(self) -> None:
        """Take the reports of leases that ended."""
        self.connector.scheduler.update_connector_output(
            self.connector.worker.get_transfer_results()
        )

    def close(self) -> None:
        self.connector.shutdown()

    def _result_of(self, request_id: str) -> TransferResults:
        deadline = time.monotonic() + REPORT_TIMEOUT_S
        while time.monotonic() < deadline:
            results = self.connector.worker.get_transfer_results()
            self.connector.scheduler.update_connector_output(results)
            if request_id in results.finished_recving:
                return results
            self._report.wait(1.0)
            self._report.clear()
        raise BenchError(f"no report of {request_id} within {REPORT_TIMEOUT_S:g} s")
