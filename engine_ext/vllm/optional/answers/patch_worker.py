"""A worker treats a resumed request as one that was preempted: with what it has generated so far.

vLLM's model runner keeps running requests in `InputBatch`; penalties, `min_tokens`, bad words and
other logits processors read a request's output tokens there when it is added. We put the payload's
tokens on the request before that, once, and advance a seeded generator by one draw per token.

This is for vLLM's first model runner only: the second gets all tokens of a new request, and its
generators count positions.

If `add_request` no longer reads `output_token_ids`, resumed answers are sampled as if these tokens
were prompt. If vLLM draws more often or in another way, a seeded answer differs from that of one
engine.
"""

from typing import Any

from vllm.v1.worker.gpu_input_batch import InputBatch

from engine_ext.vllm.compat.patching import wrap
from engine_ext.vllm.optional.answers.resumed_request import token_ids_in

RESUMED = "_disagg_resumed"
DRAW = 4
"""What one draw takes of a CUDA generator's sequence, as vLLM's runner itself takes it back."""
SEEDS = 2**31
"""On the CPU, a draw is one seed."""


def install() -> None:
    """Idempotent."""
    wrap(InputBatch, "add_request", _wrap_add_request)


def _wrap_add_request(original: Any) -> Any:
    def add_request(self: Any, request: Any) -> Any:
        token_ids = token_ids_in(request.sampling_params)
        if token_ids and not hasattr(request, RESUMED):
            # Once: requests come again, whenever they were not in a step.
            setattr(request, RESUMED, True)
            if not request.output_token_ids:
                request.output_token_ids.extend(token_ids)
                _advance(request.generator, len(token_ids))
        return original(self, request)

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
