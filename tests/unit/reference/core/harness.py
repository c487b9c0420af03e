"""An engine core stepped by the test itself, and a pair of cores joined by copied blocks."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from engine_ext.common.config import ConnectorConfig, LoadFailurePolicy
from engine_ext.common.load_failure import LoadFailures
from engine_ext.common.orders import StepMetadata
from engine_ext.common.types import (
    BlockIds,
    CacheGeometry,
    ConnectorStats,
    EngineIdentity,
    EngineRequest,
    FinishDecision,
    FinishStatus,
    MatchedTokens,
    Region,
    TransferResults,
)
from engine_ext.reference.answer import ResumedAnswer
from engine_ext.reference.config import EngineConfig
from engine_ext.reference.core import EngineCore
from engine_ext.reference.engine import merge
from engine_ext.reference.host import build_model
from engine_ext.reference.messages import GenerateRequest, RequestOutput, SamplingParams
from engine_ext.reference.model import Decoder
from engine_ext.reference.model_config import read_model_config
from engine_ext.scheduler.loans import PrefixCache, PromptKeys
from engine_ext.scheduler.scheduler import SchedulerConnector
from engine_ext.worker.staging import StagingFactory

BLOCK = 8
MAX_STEPS = 2000


def greedy(max_tokens: int = 16, **changes: Any) -> SamplingParams:
    return replace(SamplingParams(temperature=0.0, max_tokens=max_tokens), **changes)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Printable ASCII, different for every seed from the first token on."""
    return tuple(32 + (seed * 31 + i * i * 7 + i * seed) % 95 for i in range(length))


def request(
    request_id: str,
    tokens: Sequence[int],
    sampling: SamplingParams | None = None,
    params: dict[str, Any] | None = None,
    threshold: float | None = None,
    salt: str | None = None,
) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=tuple(tokens),
        sampling=sampling or greedy(),
        kv_transfer_params=params,
        cache_hit_threshold=threshold,
        cache_salt=salt,
    )


def make_core(
    model_dir: Path,
    *,
    connect: Callable[..., Any] | None = None,
    model: Decoder | None = None,
    clock: Callable[[], float] = time.perf_counter,
    **changes: Any,
) -> EngineCore:
    defaults: dict[str, Any] = {"block_size": BLOCK, "num_blocks": 129, "num_threads": 1}
    config = EngineConfig(model=model_dir, **(defaults | changes))
    model_config = read_model_config(model_dir)
    return EngineCore(
        config,
        model_config,
        model or build_model(config, model_config),
        Tokenizer.from_file(str(model_dir / "tokenizer.json")),
        connect,
        clock,
    )


class Driver:
    """Steps a core and sorts what comes out."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.outputs: dict[str, list[RequestOutput]] = {}

    def add(self, *requests: GenerateRequest) -> None:
        for one in requests:
            self.outputs.setdefault(one.request_id, [])
            self._keep(self.core.add(one))

    def go_on(self, one: GenerateRequest, begun: ResumedAnswer) -> None:
        """Adds a request that began elsewhere."""
        self.outputs.setdefault(one.request_id, [])
        self._keep(self.core.add(one, begun))

    def abort(self, request_id: str) -> None:
        self._keep(self.core.abort(request_id))

    def step(self) -> None:
        for output in self.core.step().outputs:
            self._keep(output)
        self.core.scheduler.check_integrity()

    def step_until(self, condition: Callable[[], bool]) -> None:
        for _ in range(MAX_STEPS):
            if condition():
                return
            self.step()
        raise AssertionError(f"not reached within {MAX_STEPS} steps")

    def finish(self, *request_ids: str) -> None:
        self.step_until(lambda: all(self.is_finished(i) for i in request_ids))

    def run(self, *requests: GenerateRequest) -> list[RequestOutput]:
        self.add(*requests)
        self.finish(*(one.request_id for one in requests))
        return [self.result(one.request_id) for one in requests]

    def is_finished(self, request_id: str) -> bool:
        got = self.outputs[request_id]
        return bool(got) and got[-1].finish_reason is not None

    def result(self, request_id: str) -> RequestOutput:
        return merge(self.outputs[request_id])

    def assert_empty(self) -> None:
        stats = self.core.stats()
        self.core.scheduler.check_integrity()
        assert stats.num_blocks_free == stats.num_blocks_total
        assert (stats.num_running, stats.num_waiting, stats.num_waiting_for_remote_kv) == (0, 0, 0)

    def _keep(self, output: RequestOutput | None) -> None:
        if output is not None:
            assert not self.is_finished(output.request_id), "an output after the last one"
            self.outputs[output.request_id].append(output)


@dataclass
class FakeScheduler:
    """Offers `external[request_id]` tokens, delays frees of `held`, writes down every call."""

    calls: list[str]
    external: dict[str, int | None] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    raising: set[str] = field(default_factory=set)
    blocks: dict[str, BlockIds] = field(default_factory=dict)
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    pending: bool = False
    policy: LoadFailurePolicy = "fail"
    proofs_unreadable: int = 0
    engine_id_clashes: int = 0
    load_failures: LoadFailures = field(default_factory=LoadFailures)

    def on_new_request(self, request: EngineRequest) -> None:
        self._called("on_new_request", request)

    def get_num_new_matched_tokens(
        self, request: EngineRequest, num_computed_tokens: int
    ) -> MatchedTokens:
        self._called("get_num_new_matched_tokens", request, num_computed_tokens)
        total = self.external.get(request.request_id, 0)
        if total is None:
            return MatchedTokens(None, True)
        missing = total - num_computed_tokens
        return MatchedTokens(missing, True) if missing > 0 else MatchedTokens(0, False)

    def update_state_after_alloc(
        self, request: EngineRequest, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        self._called("update_state_after_alloc", request, num_external_tokens)
        if num_external_tokens:
            self.blocks[request.request_id] = block_ids
            self.external[request.request_id] = 0

    def fail_load(self, request_id: str) -> None:
        self._called(f"fail_load {request_id}")

    wants_steps = False

    def on_step(
        self, request_id: str, block_ids: BlockIds, num_computed_tokens: int, num_new_tokens: int
    ) -> None:
        pass

    def on_preempted(self, request_id: str) -> None:
        pass

    def load_failure_policy(self, request: EngineRequest) -> LoadFailurePolicy:
        return self.policy

    def has_pending_work(self) -> bool:
        return self.pending

    def release(self, engine_id: str, request_id: str) -> bool:
        self._called("release")
        return request_id in self.held

    def revoke(self, request_id: str) -> bool:
        self._called(f"revoke {request_id}")
        return request_id in self.held

    def lend_from(self, cache: PrefixCache) -> None:
        pass

    def borrow_with(self, keys: PromptKeys) -> None:
        pass

    def drain(self) -> None:
        self._called("drain")

    def build_connector_meta(self) -> StepMetadata:
        self._called("build_connector_meta")
        self.pending = False
        return StepMetadata()

    def recover(self, results: TransferResults) -> TransferResults:
        return results

    def update_connector_output(self, results: TransferResults) -> TransferResults:
        self._called("update_connector_output")
        return results

    def request_finished(
        self, request: EngineRequest, block_ids: BlockIds, status: FinishStatus
    ) -> FinishDecision:
        self._called("request_finished", request, status.value)
        if request.request_id not in self.held or not status.leaves_kv:
            return FinishDecision(False, None)
        self.blocks[request.request_id] = block_ids
        self.pending = True
        return FinishDecision(True, self.answers.get(request.request_id))

    def fail_finish(self, request_id: str) -> FinishDecision:
        self._called(f"fail_finish {request_id}")
        return FinishDecision(False, None)

    def _called(self, hook: str, request: EngineRequest | None = None, *values: Any) -> None:
        who = [request.request_id] if request else []
        self.calls.append(" ".join(map(str, [hook, *who, *values])))
        if hook in self.raising:
            raise RuntimeError(f"planted in {hook}")


@dataclass
class FakeWorker:
    """Reports what the test puts into `results`, once."""

    calls: list[str]
    results: TransferResults = field(default_factory=TransferResults)
    raising: set[str] = field(default_factory=set)
    wake: Callable[[], None] = lambda: None

    def set_wake(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    @property
    def has_results(self) -> bool:
        return bool(self.results)

    def start_load_kv(self, meta: StepMetadata) -> None:
        self._called("start_load_kv")

    def fail_loads(self, meta: StepMetadata) -> None:
        self._called("fail_loads")

    def wait_for_save(self, meta: StepMetadata) -> None:
        pass

    def get_transfer_results(self) -> TransferResults:
        self._called("get_transfer_results")
        results, self.results = self.results, TransferResults()
        return results

    def stats(self) -> ConnectorStats:
        return ConnectorStats()

    def inspect(self, asked: str | None = None) -> None:
        return None

    def report(
        self, *, sent: Iterable[str] = (), received: Iterable[str] = (), failed: Iterable[str] = ()
    ) -> None:
        self.results = TransferResults(
            frozenset(sent), frozenset(received) | frozenset(failed), frozenset(failed)
        )
        self.wake()

    def _called(self, hook: str) -> None:
        self.calls.append(hook)
        if hook in self.raising:
            raise RuntimeError(f"planted in {hook}")


class FakeConnector:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.scheduler = FakeScheduler(self.calls)
        self.worker = FakeWorker(self.calls)
        self.regions: list[Region] = []
        self.was_shut_down = False

    def start(self, regions: Sequence[Region], stage: StagingFactory | None = None) -> None:
        self.regions = list(regions)

    def shutdown(self) -> None:
        self.was_shut_down = True


@dataclass
class LoadlessConnector:
    """The real scheduler half, and a worker half whose results the test gives."""

    config: ConnectorConfig
    geometry: CacheGeometry
    worker: FakeWorker = field(default_factory=lambda: FakeWorker([]))

    def __post_init__(self) -> None:
        identity = EngineIdentity(self.config.engine_id, "x", 1)
        self.scheduler = SchedulerConnector(self.config, identity, self.geometry)

    def start(self, regions: Sequence[Region], stage: StagingFactory | None = None) -> None:
        pass

    def shutdown(self) -> None:
        pass


def copy_blocks(
    source: EngineCore, source_ids: BlockIds, target: EngineCore, target_ids: BlockIds
) -> None:
    """Position by position, what a transfer does."""
    pairs = list(zip(source_ids[0], target_ids[0], strict=False))
    for ours, theirs in zip(target.cache.layers, source.cache.layers, strict=True):
        for src, dst in pairs:
            ours[dst] = theirs[src]
