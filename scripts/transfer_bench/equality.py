"""Two engines on one device must answer as one engine alone: the oracle for wrong KV.

python -m scripts.transfer_bench.equality --device cuda
python -m scripts.transfer_bench.equality --device cuda --engine vllm --lengths 100,16000
"""

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from scripts.bench.errors import BenchError
from scripts.transfer_bench.cli import positive
from scripts.transfer_bench.reference import BLOCK_SIZE, ReferenceEngine, VllmEngine

LENGTHS = (1, 31, 32, 33, 64, 100, 255, 256, 500)
"""Of prompts, in tokens: around one block, and several."""
MAX_TOKENS = 16
ENGINES = {"reference": ReferenceEngine, "vllm": VllmEngine}


def main(arguments: Sequence[str] | None = None) -> int:
    """0: every token is equal; 1: not, or no engine."""
    parser = argparse.ArgumentParser(prog="equality", description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--engine", choices=ENGINES, default="reference")
    parser.add_argument("--buffers", choices=("cpu", "cuda"), help="where KV is handed over")
    parser.add_argument("--lengths", type=_lengths, default=LENGTHS, help="of prompts, in tokens")
    options = parser.parse_args(arguments)
    os.environ.setdefault("UCX_NET_DEVICES", "all")  # UCX otherwise looks for RDMA devices only.
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    try:
        summary = compare(options.device, options.engine, options.buffers, options.lengths)
    except BenchError as error:
        sys.stderr.write(f"equality: error: {error}\n")
        return 1
    sys.stdout.write(f"{summary}\n")
    return 0


def compare(
    device: str,
    engine: str = "reference",
    buffers: str | None = None,
    lengths: Sequence[int] = LENGTHS,
) -> str:
    """Raises BenchError for the first prompt whose answers differ."""
    from engine_ext.reference.tiny_model import TinyModel, write_tiny_model

    positions = max(*lengths, 1000) + 2 * MAX_TOKENS
    num_blocks = 256 + 2 * (positions // BLOCK_SIZE)
    with (
        tempfile.TemporaryDirectory() as directory,
        ExitStack() as engines,
        ThreadPoolExecutor(3) as pool,
    ):
        # One for all: to vLLM, models at two places are two models.
        model = write_tiny_model(Path(directory) / "model", TinyModel(max_positions=positions))

        def start(name: str) -> ReferenceEngine:
            folder = Path(directory) / name
            made = ENGINES[engine](folder, num_blocks, device, buffers=buffers, model=model)
            return engines.enter_context(made)

        alone, prefiller, decoder = pool.map(start, ("alone", "p", "d"))
        for length in lengths:
            prompt = [random.Random(length * 1000 + i).randrange(256) for i in range(length)]
            expected = _tokens(alone.complete(prompt, MAX_TOKENS))
            params = prefiller.complete(prompt, 1, {"do_remote_decode": True})
            found = _tokens(decoder.complete(prompt, MAX_TOKENS, params["kv_transfer_params"]))
            if found != expected:
                raise BenchError(f"prompt of {length} tokens: {expected} alone, {found} by two")
        received = decoder.blocks_received()
    if not received:
        raise BenchError("the decode engine received no KV: it computed everything itself")
    return (
        f"{len(lengths)} prompts of up to {max(lengths)} tokens on {device}: every token equal, "
        f"{received} blocks transferred"
    )


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(map(positive, text.split(",")))


def _tokens(answer: dict[str, object]) -> list[int]:
    choices = answer["choices"]
    assert isinstance(choices, list)
    tokens: list[int] = choices[0]["token_ids"]
    return tokens


if __name__ == "__main__":
    raise SystemExit(main())
