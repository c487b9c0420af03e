"""Two engines on one device must answer as one engine alone: the oracle for wrong KV.

python -m scripts.transfer_bench.equality --device cuda
"""

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from scripts.bench.errors import BenchError
from scripts.transfer_bench.reference import ReferenceEngine

LENGTHS = (1, 31, 32, 33, 64, 100, 255, 256, 500)
"""Of prompts, in tokens: around one block, and several."""
MAX_TOKENS = 16
NUM_BLOCKS = 256


def main(arguments: Sequence[str] | None = None) -> int:
    """0: every token is equal; 1: not, or no engine."""
    parser = argparse.ArgumentParser(prog="equality", description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    options = parser.parse_args(arguments)
    os.environ.setdefault("UCX_NET_DEVICES", "all")  # UCX otherwise looks for RDMA devices only.
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    try:
        summary = compare(options.device)
    except BenchError as error:
        sys.stderr.write(f"equality: error: {error}\n")
        return 1
    sys.stdout.write(f"{summary}\n")
    return 0


def compare(device: str) -> str:
    """Raises BenchError for the first prompt whose answers differ."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as engines:
        alone, prefiller, decoder = (
            engines.enter_context(ReferenceEngine(Path(directory) / name, NUM_BLOCKS, device))
            for name in ("alone", "p", "d")
        )
        for length in LENGTHS:
            prompt = [random.Random(length * 1000 + i).randrange(256) for i in range(length)]
            expected = _tokens(alone.complete(prompt, MAX_TOKENS))
            params = prefiller.complete(prompt, 1, {"do_remote_decode": True})
            found = _tokens(decoder.complete(prompt, MAX_TOKENS, params["kv_transfer_params"]))
            if found != expected:
                raise BenchError(f"prompt of {length} tokens: {expected} alone, {found} by two")
        received = decoder.blocks_received()
    if not received:
        raise BenchError("the decode engine received no KV: it computed everything itself")
    return f"{len(LENGTHS)} prompts on {device}: every token equal, {received} blocks transferred"


def _tokens(answer: dict[str, object]) -> list[int]:
    choices = answer["choices"]
    assert isinstance(choices, list)
    tokens: list[int] = choices[0]["token_ids"]
    return tokens


if __name__ == "__main__":
    raise SystemExit(main())
