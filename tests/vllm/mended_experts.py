"""Expert parallel on a CPU, where vLLM 0.32 starts with it and ends at the first prompt: a plugin
of vLLM's, for the servers of one test. Two things are missing there, and are added.

`CPUUnquantizedExperts` drops the map from the model's experts to those of the rank: its kernel is
given numbers of experts that the rank does not have, and reads and writes what is not its own. And
ranks of data parallel size cannot send each other tokens: `CpuCommunicator` has neither
`all_gatherv` nor `reduce_scatterv`.
"""

from collections.abc import Sequence
from typing import Any


def register() -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    original = CPUUnquantizedExperts.apply

    def apply(self: Any, **given: Any) -> None:
        if (owned := given["expert_map"]) is not None:
            ids = owned[given["topk_ids"].long()]
            given["topk_weights"] = given["topk_weights"] * (ids >= 0)
            given["topk_ids"] = ids.clamp(min=0)
        original(self, **given)

    CPUUnquantizedExperts.apply = apply
    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv


def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: Sequence[int] = ()) -> Any:
    """Of one tensor or of several; `sizes`: how many rows each rank has."""
    import torch

    assert dim == 0
    if isinstance(input_, list):
        return [all_gatherv(self, each, dim, sizes) for each in input_]
    largest = max(sizes)
    padded = input_.new_zeros((largest, *input_.shape[1:]))
    padded[: len(input_)] = input_
    of_ranks = self.all_gather(padded, 0).split(largest)
    return torch.cat([rows[:size] for rows, size in zip(of_ranks, sizes, strict=True)])


def reduce_scatterv(self: Any, input_: Any, dim: int = 0, sizes: Sequence[int] = ()) -> Any:
    """`sizes`: how many rows of the sum each rank is given."""
    assert dim == 0
    return self.all_reduce(input_.contiguous()).split(list(sizes))[self.rank_in_group]
