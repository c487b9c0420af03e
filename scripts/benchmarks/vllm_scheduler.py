"""What the connector costs vLLM's scheduler process, beside stock vLLM's NixlConnector.

It needs a Python with vLLM (scripts/install_vllm prints the path of one):

    VLLM_PYTHON scripts/bench.py vllm-scheduler

Three contestants take turns in one process, with vLLM's scheduler and without a model:

* stock: vLLM's scheduler with NixlConnector.
* connector: vLLM's scheduler with DisaggConnector.
* scheduler: DisaggScheduler with DisaggConnector.

Figures are medians of CPU time. A step is `schedule` and `update_from_output`. A prompt is a decode
leg from `add_request` to the end of the step that orders its load, or a prefill leg to the end of
the step that leases its blocks, without prefix caching, so that vLLM hashes no blocks.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from scripts.benchmarks.common import Sample, bench_parser, free_ports, positive

BLOCK = 16
LEASES = 64
"""Finished requests whose blocks wait for a reader."""
LAYER = "model.layers.0.self_attn.attn"
CONTESTANTS = {
    "stock": ("NixlConnector", None),
    "connector": ("DisaggConnector", None),
    "scheduler": ("DisaggConnector", "engine_ext.vllm.scheduler.DisaggScheduler"),
}


class Contestant:
    """One vLLM scheduler with a connector."""

    def __init__(self, name: str, model: Path, num_blocks: int, max_model_len: int) -> None:
        import torch
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        connector, scheduler_cls = CONTESTANTS[name]
        module = {} if name == "stock" else {"kv_connector_module_path": "engine_ext.vllm"}
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(*free_ports(1))
        config = EngineArgs(
            model=str(model),
            block_size=BLOCK,
            enforce_eager=True,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_model_len,
            scheduler_cls=scheduler_cls,
            enable_prefix_caching=False,
            kv_transfer_config=KVTransferConfig(
                kv_connector=connector, kv_role="kv_both", **module
            ),
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        cache = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec([LAYER], spec)])
        cls = config.scheduler_config.get_scheduler_cls()
        self.name = name
        self.scheduler: Any = cls(config, cache, StructuredOutputManager(config), BLOCK)
        self._serial = itertools.count()

    def request(self, num_tokens: int, max_tokens: int = 1 << 20, **extra: Any) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
        sampling.update_from_generation_config({}, 1)
        return Request(f"{self.name}-{next(self._serial)}", _prompt(num_tokens), sampling, None)

    def step(self, **transfers: Any) -> None:
        """Run one engine step, in which each scheduled request gets a token. `transfers` are the
        fields of the workers' report."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        scheduled = self.scheduler.schedule()
        names = list(scheduled.num_scheduled_tokens)
        places = {name: place for place, name in enumerate(names)}
        report = KVConnectorOutput(**transfers)
        output = ModelRunnerOutput(names, places, [[1]] * len(names), kv_connector_output=report)
        self.scheduler.update_from_output(scheduled, output)

    def end(self, name: str) -> None:
        """Abort a request, and end its load, so that its blocks are free again."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        # Stock's workers report the end of the load, ours the end of the blocks' fence.
        ended = "finished_recving" if self.name == "stock" else "finished_sending"
        self.step(**({ended: {name}} if name in self.scheduler.requests else {}))


def _prompt(num_tokens: int) -> list[int]:
    return [(7 * position) % 250 for position in range(num_tokens)]


def _params(name: str, num_tokens: int) -> dict[str, Any]:
    """Return the kv_transfer_params of a prefill engine with the same connector."""
    params: dict[str, Any] = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1 + 3 * block for block in range(-(-num_tokens // BLOCK))]],
        "remote_engine_id": "prefill-engine",
        "remote_request_id": "cmpl-1",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": num_tokens,
        "remote_blocks_expiry_time": None,
    }
    if name != "stock":
        from engine_ext.common.prefix_hashes import PrefixHashes

        params |= {"transfer_mode": "pull", "remote_block_size": BLOCK}
        params["prefix_proof"] = PrefixHashes.of(_prompt(num_tokens)).to_wire(params)
    return params


def _step_seconds(contestant: Contestant, batch: int, steps: int, leases: int = 0) -> float:
    leased = {_prefill(contestant, BLOCK)[0] for _ in range(leases)}
    requests = [contestant.request(BLOCK) for _ in range(batch)]
    for request in requests:
        contestant.scheduler.add_request(request)
    for _ in range(4):
        contestant.step()
    began = time.process_time()
    for _ in range(steps):
        contestant.step()
    seconds = (time.process_time() - began) / steps
    for request in requests:
        contestant.end(request.request_id)
    contestant.step(finished_sending=leased)
    return seconds


def _prompt_seconds(contestant: Contestant, num_tokens: int) -> float:
    params = _params(contestant.name, num_tokens)
    request = contestant.request(num_tokens, kv_transfer_params=params)
    began = time.process_time()
    contestant.scheduler.add_request(request)
    contestant.step()
    seconds = time.process_time() - began
    assert request.status.name == "WAITING_FOR_REMOTE_KVS", request.status
    contestant.end(request.request_id)
    return seconds


def _prefill_seconds(contestant: Contestant, num_tokens: int) -> float:
    name, seconds = _prefill(contestant, num_tokens)
    contestant.step(finished_sending={name})
    return seconds


def _prefill(contestant: Contestant, num_tokens: int) -> tuple[str, float]:
    """Run a prefill leg until its blocks are leased. Return its request id, and seconds."""
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    request = contestant.request(num_tokens, max_tokens=1, kv_transfer_params=params)
    began = time.process_time()
    contestant.scheduler.add_request(request)
    contestant.step()
    seconds = time.process_time() - began
    assert request.is_finished()
    return str(request.request_id), seconds


def _compare(
    what: str, contestants: list[Contestant], rounds: int, measure: Callable[[Contestant], float]
) -> None:
    """Measure in turns, after a round that warms up, and print each contestant's CPU time."""
    print(what)
    found: dict[str, list[float]] = {one.name: [] for one in contestants}
    for number in range(rounds + 1):
        for one in contestants:
            gc.collect()
            seconds = measure(one)
            if number:
                found[one.name].append(seconds * 1e6)
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    for name, values in found.items():
        median = Sample(values).median
        measured = f"{median:9.1f} us  ({min(values):.1f} to {max(values):.1f})"
        print(f"  {name:10}{measured}  {median / Sample(found['stock']).median:.2f} of stock")


def main(arguments: list[str] | None = None) -> int:
    parser = bench_parser("vllm-scheduler", __doc__)
    parser.add_argument("--rounds", type=positive, default=15, help="of each figure (15)")
    parser.add_argument("--batch", type=positive, default=16, help="decoding requests (16)")
    parser.add_argument("--steps", type=positive, default=300, help="of one measurement (300)")
    parser.add_argument("--tokens", type=positive, default=131_072, help="of the prompt (131072)")
    options = parser.parse_args(arguments)
    try:
        import vllm
    except ImportError:
        print("bench vllm-scheduler: this Python has no vLLM", file=sys.stderr)
        return 2
    logging.disable(logging.WARNING)
    from engine_ext.reference.tiny_model import write_tiny_model

    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    length = options.tokens + BLOCK
    num_blocks = 2 * length // BLOCK + options.batch * (options.steps // BLOCK + 8)
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder))
        contestants = [Contestant(name, model, num_blocks, length) for name in CONTESTANTS]
        print(f"vLLM {vllm.__version__}")
        compare = partial(_compare, contestants=contestants, rounds=options.rounds)
        for batch, leases in ((options.batch, 0), (options.batch, LEASES), (0, LEASES), (0, 0)):
            step = partial(_step_seconds, batch=batch, steps=options.steps, leases=leases)
            compare(f"a step of {batch} decoding requests and {leases} leased ones", measure=step)
        for what, seconds in (("a decode", _prompt_seconds), ("a prefill", _prefill_seconds)):
            prompt = partial(seconds, num_tokens=options.tokens)
            compare(f"a prompt of {options.tokens} tokens at {what} engine", measure=prompt)
        for one in contestants:
            one.scheduler.shutdown()
    return 0
