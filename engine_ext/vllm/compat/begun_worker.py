"""A worker takes up a request that begins in mid-answer as it takes up one that was preempted: with
what it has generated so far. So penalties, `min_tokens`, bad words and other logits processors see
given tokens as output.

vLLM's first model runner only: the second is told of a new request's tokens, and its generators
count positions.
"""

import functools
from typing import Any

from vllm.v1.worker.gpu_input_batch import InputBatch

from engine_ext.vllm.given import token_ids_in

MARK = "_disagg_begun"
DRAW = 4
"""What one draw takes of a CUDA generator's sequence, as vLLM's runner itself takes it back."""
SEEDS = 2**31
"""On the CPU, a draw is one seed."""


def install() -> None:
    """Idempotent."""
    if not is_installed():
        InputBatch.add_request = _taking_up(InputBatch.add_request)


def is_installed() -> bool:
    return hasattr(InputBatch.add_request, MARK)


def _taking_up(original: Any) -> Any:
    @functools.wraps(original)
    def add_request(self: Any, request: Any) -> Any:
        given = token_ids_in(request.sampling_params)
        if given and not hasattr(request, MARK):
            # Once: requests come again, whenever they were not in a step.
            setattr(request, MARK, True)
            if not request.output_token_ids:
                request.output_token_ids.extend(given)
                _advance(request.generator, len(given))
        return original(self, request)

    setattr(add_request, MARK, True)
    return add_request


def _advance(generator: Any, draws: int) -> None:
    """A seeded request's, to where it would be: vLLM draws once a token."""
    if generator is None:
        return
    if generator.device.type != "cpu":
        generator.set_offset(generator.get_offset() + DRAW * draws)
        return
    import torch

    for _ in range(draws):
        torch.randint(0, SEEDS, (1,), generator=generator, dtype=torch.long)
