"""Two engines on one device must answer as one engine alone: the oracle for wrong KV.

python -m scripts.transfer_bench.equality --device cuda
python -m scripts.transfer_bench.equality --device cuda --engine vllm --lengths 33,16001 --mode push
"""

import argparse
import os
import random
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from scripts.bench.errors import BenchError
from scripts.transfer_bench.answer import Answer, distance
from scripts.transfer_bench.cli import positive
from scripts.transfer_bench.reference import (
    BLOCK_SIZE,
    CONNECTORS,
    ReferenceEngine,
    Setup,
    VllmEngine,
)

LENGTHS = (1, 31, 32, 33, 64, 100, 255, 256, 500)
"""Of prompts, in tokens: around one block, and several."""
MAX_TOKENS = 16
ENGINES: dict[str, Callable[[Path, Setup], ReferenceEngine]] = {
    "reference": ReferenceEngine,
    "vllm": VllmEngine,
}
TOLERANCES = {"float32": 1e-3, "bfloat16": 5e-2}
"""Between log-probabilities: tests/integration/oracle.py says why, of float32. In bfloat16 nothing
differs where the same kernels compute the same shapes, see `alone_answers`."""
COUNTED_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Trio:
    alone: ReferenceEngine
    prefiller: ReferenceEngine
    decoder: ReferenceEngine


def main(arguments: Sequence[str] | None = None) -> int:
    """0: all answers are equal; 1: not, or no engine."""
    parser = argparse.ArgumentParser(prog="equality", description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--engine", choices=ENGINES, default="reference")
    parser.add_argument("--mode", choices=CONNECTORS, default="pull")
    parser.add_argument("--dtype", choices=TOLERANCES, default="float32")
    parser.add_argument("--buffers", choices=("cpu", "cuda"), help="where KV is handed over")
    parser.add_argument("--checksums", action="store_true", help="with kv_checksum; pull only")
    parser.add_argument("--lengths", type=_lengths, default=LENGTHS, help="of prompts, in tokens")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the engines' logs there")
    options = parser.parse_args(arguments)
    os.environ.setdefault("UCX_NET_DEVICES", "all")  # UCX otherwise looks for RDMA devices only.
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    setup = Setup(
        0,
        options.device,
        options.mode,
        options.dtype,
        options.buffers,
        checksums=options.checksums,
    )
    try:
        summary = compare(setup, options.engine, options.lengths, options.logs)
    except BenchError as error:
        sys.stderr.write(f"equality: error: {error}\n")
        return 1
    sys.stdout.write(f"{summary}\n")
    return 0


def compare(
    setup: Setup,
    engine: str = "reference",
    lengths: Sequence[int] = LENGTHS,
    logs: Path | None = None,
) -> str:
    """Raises BenchError for the first prompt whose answers differ, or whose KV did not come."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as engines:
        trio = _start(setup, engine, max(lengths), Path(directory), logs, engines)
        farthest, fetched = 0.0, 0
        for length in lengths:
            prompt = [random.Random(length * 1000 + i).randrange(256) for i in range(length)]
            expected = alone_answers(trio.alone, prompt, engine)
            before = trio.decoder.tokens_fetched()
            found = _by_two(trio, prompt, setup.mode)
            if difference := expected.difference(found, TOLERANCES[setup.dtype]):
                raise BenchError(f"prompt of {length} tokens: {difference}")
            fetched += _fetched(trio.decoder, before, length)
            farthest = max(farthest, distance(expected.logprobs, found.logprobs))
    return (
        f"{len(lengths)} prompts of up to {max(lengths)} tokens on {setup.device}: every token "
        f"equal, log-probabilities within {farthest:.1g}, KV of {fetched} tokens transferred"
    )


def _start(
    setup: Setup, engine: str, longest: int, directory: Path, logs: Path | None, engines: ExitStack
) -> Trio:
    from engine_ext.reference.tiny_model import TinyModel, write_tiny_model

    positions = max(longest, 1000) + 2 * MAX_TOKENS
    # One for all: to vLLM, models at two places are two models.
    model = write_tiny_model(directory / "model", TinyModel(max_positions=positions))
    full = replace(setup, num_blocks=256 + 2 * (positions // BLOCK_SIZE), model=model)

    def start(name: str) -> ReferenceEngine:
        return engines.enter_context(ENGINES[engine]((logs or directory) / name, full))

    with ThreadPoolExecutor(3) as pool:
        return Trio(*pool.map(start, ("alone", "p", "d")))


def alone_answers(alone: ReferenceEngine, prompt: list[int], engine: str) -> Answer:
    """A decode engine computes a prompt's last token in a step of its own. On a GPU vLLM's kernels
    round otherwise there than within a prompt (in float32, too: Triton multiplies in TF32), which
    may change tokens. So vLLM is asked twice: the second time a prompt of whole blocks and one
    token is computed from its prefix cache in the very same shapes."""
    if engine == "vllm":
        alone.complete(prompt, 1)
    return Answer.in_body(alone.complete(prompt, MAX_TOKENS))


def _by_two(trio: Trio, prompt: list[int], mode: str) -> Answer:
    request_id = str(uuid.uuid4())
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    with ThreadPoolExecutor(1) as pool:
        prefill = pool.submit(trio.prefiller.complete, prompt, 1, asked, request_id)
        if mode == "pull":
            params = prefill.result().get("kv_transfer_params")
            if not params:
                raise BenchError("the prefill engine offers no KV")
        else:
            params = {"do_remote_prefill": True, "remote_request_id": request_id}
            params |= trio.prefiller.coordinates()
        answer = trio.decoder.complete(prompt, MAX_TOKENS, {"retain": False, **params}, request_id)
        prefill.result()
    return Answer.in_body(answer)


def _fetched(decoder: ReferenceEngine, before: int, length: int) -> int:
    """All of a prompt but its last token is fetched: a decoder that computes it would answer right,
    too. Counted a moment after the answer."""
    deadline = time.monotonic() + COUNTED_SECONDS
    while (fetched := decoder.tokens_fetched() - before) < length - 1:
        if time.monotonic() > deadline:
            raise BenchError(
                f"prompt of {length} tokens: the decode engine was given the KV of {fetched} and "
                "computed the others itself"
            )
        time.sleep(0.05)
    return fetched


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(map(positive, text.split(",")))


if __name__ == "__main__":
    raise SystemExit(main())
