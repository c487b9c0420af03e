"""What the connector costs vLLM's scheduler process, beside stock vLLM's NixlConnector.

It runs in a Python that has vLLM, on this process's CPU alone, with vLLM's own scheduler and no
model:

    make test-vllm ARGS=--collect-only      installs such a Python
    VLLM_PYTHON scripts/bench.py vllm-scheduler

Contestants take turns within one process, and figures are medians of CPU time:

* stock: vLLM's scheduler with NixlConnector.
* connector: vLLM's scheduler with DisaggConnector.
* scheduler: DisaggScheduler with DisaggConnector.

`step` is one engine step (`schedule` and `update_from_output`) of a batch of decoding requests.
`prompt` is a decode leg from `add_request` to the end of the step that orders its load. Without
prefix caching, so that vLLM hashes no blocks; the params are those of a prefill engine with the
same connector.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import logging
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BLOCK = 16
LAYER = "model.layers.0.self_attn.attn"
CONTESTANTS = {
    "stock": ("NixlConnector", None),
    "connector": ("DisaggConnector", None),
    "scheduler": ("DisaggConnector", "engine_ext.vllm.scheduler.DisaggScheduler"),
}


class Contestant:
    """One vLLM scheduler with a connector. `serial` makes request ids unique."""

    def __init__(self, name: str, model: Path, num_blocks: int, max_model_len: int) -> None:
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        connector, scheduler_cls = CONTESTANTS[name]
        module = {} if name == "stock" else {"kv_connector_module_path": "engine_ext.vllm"}
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(_free_port())
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
        import torch

        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        cache = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec([LAYER], spec)])
        cls = config.scheduler_config.get_scheduler_cls()
        self.name = name
        self.scheduler: Any = cls(config, cache, StructuredOutputManager(config), BLOCK)
        self._serial = itertools.count()

    def add(self, num_tokens: int, params: dict[str, Any] | None = None) -> str:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        extra = {} if params is None else {"kv_transfer_params": params}
        sampling = SamplingParams(max_tokens=1 << 20, ignore_eos=True, extra_args=extra)
        sampling.update_from_generation_config({}, 1)
        request = Request(f"{self.name}-{next(self._serial)}", _prompt(num_tokens), sampling, None)
        self.scheduler.add_request(request)
        return str(request.request_id)

    def step(self) -> Any:
        """Run one engine step. Every scheduled request whose prompt is computed gets a token."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        scheduled = self.scheduler.schedule()
        names = list(scheduled.num_scheduled_tokens)
        output = ModelRunnerOutput(
            names,
            {name: index for index, name in enumerate(names)},
            [[1]] * len(names),
            kv_connector_output=KVConnectorOutput(),
        )
        self.scheduler.update_from_output(scheduled, output)
        return scheduled

    def end(self, name: str) -> None:
        """End a request, and its load if one is in progress, so that its blocks are free again."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        scheduled = self.scheduler.schedule()
        # Stock reports the end of the load; our connector reports the fence of the blocks.
        field = "finished_recving" if self.name == "stock" else "finished_sending"
        done = KVConnectorOutput(**{field: {name}})
        names = list(scheduled.num_scheduled_tokens)
        output = ModelRunnerOutput(
            names, {one: i for i, one in enumerate(names)}, [[1]] * len(names)
        )
        if name in self.scheduler.requests:
            output.kv_connector_output = done
        self.scheduler.update_from_output(scheduled, output)


def _prompt(num_tokens: int) -> list[int]:
    return [(7 * position) % 250 for position in range(num_tokens)]


def _params(name: str, num_tokens: int) -> dict[str, Any]:
    """The kv_transfer_params of a prefill engine's answer, with blocks scattered over its cache."""
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


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _cpu(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _measure_steps(contestant: Contestant, batch: int, steps: int) -> float:
    """Return the CPU seconds of one step with `batch` decoding requests."""
    names = [contestant.add(BLOCK) for _ in range(batch)]
    for _ in range(4):
        contestant.step()
    seconds = _cpu(lambda: [contestant.step() for _ in range(steps)]) / steps
    for name in names:
        contestant.end(name)
    return seconds


def _measure_prompt(contestant: Contestant, num_tokens: int) -> float:
    """Return the CPU seconds from a decode leg's arrival to the end of the step that orders its
    load. What stays constant per process, such as the prompt's list, is made before."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    extra = {"kv_transfer_params": _params(contestant.name, num_tokens)}
    sampling = SamplingParams(max_tokens=4, ignore_eos=True, extra_args=extra)
    sampling.update_from_generation_config({}, 1)
    name = f"{contestant.name}-p{time.monotonic_ns()}"
    request = Request(name, _prompt(num_tokens), sampling, None)

    def arrive() -> None:
        contestant.scheduler.add_request(request)
        contestant.step()

    seconds = _cpu(arrive)
    assert str(request.status) == "WAITING_FOR_REMOTE_KVS", request.status
    contestant.end(name)
    return seconds


def _rounds(
    contestants: list[Contestant], rounds: int, measure: Callable[[Contestant], float]
) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {one.name: [] for one in contestants}
    for number in range(rounds + 1):
        for one in contestants:
            gc.collect()
            seconds = measure(one)
            if number:  # the first round warms up
                found[one.name].append(seconds)
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def _lines(found: dict[str, list[float]], unit: str, factor: float) -> Iterator[str]:
    stock = statistics.median(found["stock"])
    for name, values in found.items():
        median = statistics.median(values)
        low, high = min(values) * factor, max(values) * factor
        ratio = f"{median / stock:.2f} of stock"
        yield f"  {name:10} {median * factor:8.2f} {unit}  ({low:.2f} to {high:.2f})  {ratio}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench vllm-scheduler",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=15, help="repetitions of each figure (15)")
    parser.add_argument("--batch", type=int, default=16, help="decoding requests of a step (16)")
    parser.add_argument("--steps", type=int, default=300, help="steps of one measurement (300)")
    parser.add_argument("--tokens", type=int, default=131_072, help="of the prompt (131072)")
    options = parser.parse_args(arguments)
    try:
        import vllm
    except ImportError:
        print("bench vllm-scheduler: this Python has no vLLM", file=sys.stderr)
        return 2
    logging.disable(logging.WARNING)
    from engine_ext.reference.tiny_model import write_tiny_model

    length = options.tokens + 64
    num_blocks = 2 * -(-length // BLOCK) + options.batch * (options.steps // BLOCK + 8)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
        model = write_tiny_model(Path(folder))
        contestants = [Contestant(name, model, num_blocks, length) for name in CONTESTANTS]
        try:
            steps = _rounds(
                contestants,
                options.rounds,
                lambda one: _measure_steps(one, options.batch, options.steps),
            )
            prompts = _rounds(
                contestants, options.rounds, lambda one: _measure_prompt(one, options.tokens)
            )
        finally:
            for one in contestants:
                one.scheduler.shutdown()
    print(f"vLLM {vllm.__version__}, CPU time, median of {options.rounds} (least to most)")
    print(f"one step of {options.batch} decoding requests")
    print(*_lines(steps, "us", 1e6), sep="\n")
    print(f"a decode leg of {options.tokens} tokens, from its arrival to the order of its load")
    print(*_lines(prompts, "ms", 1e3), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
