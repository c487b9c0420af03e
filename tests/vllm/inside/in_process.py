"""vLLM's own scheduler over our connector, in one process: no model, no NIXL, real bookkeeping.

The workers are our connector's worker halves without their owner threads: what a thread would do
with the orders is done by `Rank`, at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from engine_ext.common.orders import FailLoad, Fence, LeaseGrant, PullOrder, Revoke, StepMetadata
from engine_ext.common.types import CacheGeometry, EngineIdentity, LoadProblem
from engine_ext.vllm import describe
from engine_ext.vllm.connector import DisaggConnector
from engine_ext.vllm.optional.answers.patch_outputs import translated
from engine_ext.worker.worker import WorkerConnector
from tests.unit.engine_ext.orders import ordered
from tests.vllm.inside.planted import Fault, Planted

BLOCK = 16
NUM_BLOCKS = 64
MAX_STEPS = 50
LAYER = "model.layers.0.self_attn.attn"
FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)


def configuration(
    model: Path,
    policy: str,
    scheduler: str | None,
    extra: dict[str, Any],
    connector: str = "DisaggConnector",
) -> VllmConfig:
    config = EngineArgs(
        model=str(model),
        block_size=BLOCK,
        enforce_eager=True,
        max_model_len=512,
        scheduler_cls=scheduler,
        disable_log_stats=True,
        kv_transfer_config=KVTransferConfig(
            kv_connector=connector,
            kv_connector_module_path="engine_ext.vllm",
            kv_role="kv_both",
            kv_load_failure_policy=policy,
            kv_connector_extra_config={"bidirectional_kv_xfer": True, **extra},
        ),
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    return config


class Rank:
    """A worker's connector. A READ ends at once, and well, unless it has a `problem`; a lease when
    it is revoked or read."""

    def __init__(self, config: VllmConfig, cache: KVCacheConfig, plant: Any) -> None:
        connector: Any = DisaggConnector(config, KVConnectorRole.WORKER, cache)
        self.connector = connector
        identity = EngineIdentity("engine", "127.0.0.1", 1)
        ours = describe.connector_config(config)
        self.half = WorkerConnector(ours, CacheGeometry(BLOCK, NUM_BLOCKS), identity)
        self.connector._worker = Planted(self.half, plant)
        self.leased: set[str] = set()
        self.problem: LoadProblem | None = None
        self.late: list[str] = []
        """Requests that are fenced and into whose blocks a READ may still write."""
        self.applied: list[StepMetadata] = []

    def step(self, metadata: Any) -> KVConnectorOutput:
        self.connector.bind_connector_metadata(metadata)
        self.connector.start_load_kv(None)
        while self.half.inbox:
            self._apply(self.half.inbox.popleft())
        results = self.connector.get_transfer_results(set())
        self.connector.clear_connector_metadata()
        return KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_worker_meta=self.connector.build_connector_worker_meta(),
        )

    def read(self, request_id: str) -> None:
        """A remote has read it."""
        if request_id in self.leased:
            self.leased.discard(request_id)
            self.half.results.sent(request_id)

    def land(self) -> None:
        """Every late READ has ended."""
        for name in self.late:
            self.half.results.sent(name)
        self.late.clear()

    def _apply(self, meta: StepMetadata) -> None:
        self.applied.append(meta)
        self.leased.update(grant.request_id for grant in ordered(meta, LeaseGrant))
        for order in ordered(meta, PullOrder):
            ok = self.problem is None
            self.half.results.received(order.request_id, ok=ok, problem=self.problem)
        for name in ordered(meta, FailLoad):
            self.half.results.received(name, ok=False)
        for name in ordered(meta, Revoke):
            self.read(name)
        self.late += ordered(meta, Fence)
        if self.problem is None or not self.problem.in_quarantine:
            self.land()


@dataclass
class Ended:
    reason: str
    tokens: int
    params: dict[str, Any] | None = None


@dataclass
class Engine:
    """One vLLM engine, stepped by the test."""

    model: Path
    policy: str = "fail"
    scheduler_cls: str | None = None
    num_ranks: int = 1
    faults: list[Fault] = field(default_factory=list)
    """The first one for a method is raised, once."""
    extra: dict[str, Any] = field(default_factory=dict)
    connector: str = "DisaggConnector"
    groups: Sequence[KVCacheSpec] = (FULL,)
    model_type: str | None = None
    """Taken for the model's."""
    fired: list[Fault] = field(default_factory=list)
    ended: dict[str, Ended] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = configuration(
            self.model, self.policy, self.scheduler_cls, self.extra, self.connector
        )
        config.model_config.hf_text_config.model_type = self.model_type
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        groups = [KVCacheGroupSpec([f"{LAYER}{at}"], one) for at, one in enumerate(self.groups)]
        cache = KVCacheConfig(NUM_BLOCKS, [], groups)
        scheduler = config.scheduler_config.get_scheduler_cls()
        self.scheduler: Any = scheduler(config, cache, StructuredOutputManager(config), BLOCK)
        connector = self.scheduler.connector
        connector._scheduler = Planted(connector._scheduler, self.next_fault)
        self.ranks = [Rank(config, cache, self.next_fault) for _ in range(self.num_ranks)]
        self.aggregator = KVOutputAggregator(self.num_ranks)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.num_free = self.pool.get_num_free_blocks()

    def next_fault(self, name: str) -> Fault | None:
        found = next((fault for fault in self.faults if fault.hook == name), None)
        if found is not None:
            self.faults.remove(found)
            self.fired.append(found)
        return found

    def add(
        self,
        name: str,
        tokens: int | list[int],
        params: Any = None,
        max_tokens: int = 4,
        **extra: Any,
    ) -> Request:
        """`tokens`: those of the prompt, or so many of the usual ones."""
        if params is not None:
            extra["kv_transfer_params"] = params
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
        sampling.update_from_generation_config({}, 1)
        if isinstance(tokens, int):
            tokens = [(7 * position) % 250 for position in range(tokens)]
        request = Request(name, tokens, sampling, None, block_hasher=self.hasher)
        self.scheduler.add_request(request)
        return request

    def step(self) -> None:
        self.answer(self.scheduler.schedule())

    def answer(self, scheduled: Any, token: int = 1) -> None:
        """The model has computed that step, and sampled `token` for each prompt that is whole."""
        names = list(scheduled.num_scheduled_tokens)
        outputs: list[Any] = [
            ModelRunnerOutput(
                names,
                {name: index for index, name in enumerate(names)},
                [[token] if self._is_complete(name) else [] for name in names],
                kv_connector_output=rank.step(scheduled.kv_connector_metadata),
            )
            for rank in self.ranks
        ]
        output = self.aggregator.aggregate(outputs) if self.num_ranks > 1 else outputs[0]
        for answer in self.scheduler.update_from_output(scheduled, output).values():
            for one in answer.outputs:
                self._note(one)

    def run(self, name: str) -> Ended:
        self.step_until(lambda: name in self.ended)
        return self.ended[name]

    def step_until(self, condition: Any) -> None:
        for _ in range(MAX_STEPS):
            if condition():
                return
            assert self.scheduler.has_requests(), "the engine would sleep"
            self.step()
        raise AssertionError(f"not reached within {MAX_STEPS} steps")

    def read_all(self) -> None:
        for rank in self.ranks:
            for name in list(rank.leased):
                rank.read(name)

    def is_empty(self) -> bool:
        return not self.scheduler.requests and self.pool.get_num_free_blocks() == self.num_free

    def _is_complete(self, name: str) -> bool:
        request = self.scheduler.requests[name]
        return bool(request.num_computed_tokens >= request.num_prompt_tokens)

    def _note(self, output: EngineCoreOutput) -> None:
        if output.finish_reason is not None:
            assert output.request_id not in self.ended, "an output after the last one"
            reason, _ = translated(output.finish_reason, output.stop_reason)
            self.ended[output.request_id] = Ended(
                str(reason), len(output.new_token_ids), output.kv_transfer_params
            )


def refusal(action: Callable[[], object]) -> str:
    """Return the words with which the action is refused."""
    try:
        action()
    except (ValueError, RuntimeError) as error:
        return str(error)
    raise AssertionError("not refused")
