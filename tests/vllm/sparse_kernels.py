"""Sparse attention (DeepSeek-V3.2's) in PyTorch, for vLLM's CPU build, which has no backend for it.

The caches are those of CUDA: latents of 64 tokens a kernel block, and beside them an indexer's keys
in FP8, whose scales stand behind all the keys of a block.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.sparse_mla_attention import SharedTopkIndicesBuffer
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, MLAAttentionImpl

BLOCK = 64
"""Tokens of a kernel's block."""
AT_ONCE = 64
"""Tokens whose keys are looked up together."""
FP8 = torch.float8_e4m3fn
LARGEST = 448.0
NOT_SEEN = float("-inf")


@dataclass
class Metadata:
    num_actual_tokens: int
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    requests: torch.Tensor
    """The request of each token."""
    positions: torch.Tensor
    seq_lens: list[int]
    starts: list[int]
    block_size: int
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int = 0

    def slots(self, requests: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        blocks = self.block_table[requests, positions // self.block_size].long()
        return blocks * self.block_size + positions % self.block_size


class Builder(AttentionMetadataBuilder[Metadata]):  # type: ignore[misc]
    def __init__(self, *given: Any) -> None:  # abstract there
        super().__init__(*given)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, *_: Any) -> Metadata:
        common = common_attn_metadata
        starts = [int(value) for value in common.query_start_loc_cpu]
        seq_lens = [int(value) for value in common.seq_lens]
        requests = torch.empty(starts[-1], dtype=torch.long)
        positions = torch.empty(starts[-1], dtype=torch.long)
        for number, (first, last) in enumerate(pairwise(starts)):
            length = seq_lens[number]
            requests[first:last] = number
            positions[first:last] = torch.arange(length - (last - first), length)
        return Metadata(
            common.num_actual_tokens,
            common.slot_mapping,
            common.block_table_tensor,
            requests,
            positions,
            seq_lens,
            starts,
            self.kv_cache_spec.block_size,
            common.num_reqs,
            common.num_actual_tokens,
        )


class Impl(MLAAttentionImpl[Metadata], SharedTopkIndicesBuffer):  # type: ignore[misc]
    is_sparse = True
    can_return_lse_for_decode = False
    supports_dense_mha_prefill = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        *_: Any,
        topk_indices_buffer: Any = None,
        indexer: Any = None,
        kv_cache_dtype: str = "auto",
        **mla: Any,
    ) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_lora_rank = mla["kv_lora_rank"]
        self.q_pad_num_heads = None
        self.supports_quant_query_input = False
        self.dcp_world_size = self.pcp_world_size = 1
        self.init_topk_indices_buffer(indexer, topk_indices_buffer)

    def record_logical_topk_ready(self) -> None: ...

    def process_weights_after_loading(self, act_dtype: Any) -> None: ...

    def forward_mqa(self, q: Any, cache: torch.Tensor, held: Metadata, layer: Any) -> Any:
        queries = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        rows = cache.reshape(-1, cache.shape[-1])
        found = torch.empty(*queries.shape[:2], self.kv_lora_rank, dtype=queries.dtype)
        for first in range(0, len(queries), AT_ONCE):
            part = slice(first, min(first + AT_ONCE, len(queries)))
            chosen = self.topk_indices_buffer[part].long()
            requests = held.requests[part, None].expand_as(chosen)
            keys = rows[held.slots(requests, chosen.clamp(min=0))]
            scores = torch.einsum("thd,tkd->thk", queries[part], keys) * self.scale
            weights = scores.masked_fill((chosen < 0)[:, None], NOT_SEEN).float().softmax(-1)
            values = keys[..., : self.kv_lora_rank]
            found[part] = torch.einsum("thk,tkd->thd", weights.to(keys.dtype), values)
        return found, None

    def do_kv_cache_update(
        self, latents: Any, rotated: Any, cache: torch.Tensor, slot_mapping: torch.Tensor, *_: Any
    ) -> None:
        if cache.numel() == 0:
            return
        slots = slot_mapping.flatten().long()
        rows = torch.cat((latents, rotated.squeeze(1)), dim=-1)[: len(slots)]
        flat = cache.view(-1, cache.shape[-1])
        flat[slots[slots >= 0]] = rows[slots >= 0].to(flat.dtype)


class Backend(AttentionBackend):  # type: ignore[misc]
    supported_dtypes: ClassVar[Any] = [torch.float32, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[Any] = ["auto"]

    @staticmethod
    def get_name() -> str:
        return "CPU_MLA"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        return [BLOCK]

    @staticmethod
    def get_impl_cls() -> Any:
        return Impl

    @staticmethod
    def get_builder_cls() -> Any:
        return Builder

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True


def as_they_are(queries: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries that are not rounded to FP8, and their scales. Rounded, a query that differs by float
    noise may choose other tokens, and two engines that are both right have unlike answers."""
    return queries.float(), torch.ones(*queries.shape[:-1], 1)


def quantized(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row in FP8, and its scale, a power of two."""
    most = values.abs().amax(-1, keepdim=True).float().clamp(min=1e-10) / LARGEST
    scales = torch.exp2(torch.ceil(torch.log2(most)))
    return (values.float() / scales).clamp(-LARGEST, LARGEST).to(FP8), scales


def choose(indexer: Any, hidden_states: Any, queries: Any, new_keys: Any, weights: Any) -> Any:
    """Write the new keys, and choose tokens for each of the new ones."""
    chosen: torch.Tensor = indexer.topk_indices_buffer
    metadata = get_forward_context().attn_metadata
    if not isinstance(metadata, dict):
        return chosen
    held: Metadata = metadata[indexer.k_cache.prefix]
    keys, scales = _write(indexer, held, new_keys)
    chosen[: len(hidden_states)] = -1
    for number, (first, last) in enumerate(pairwise(held.starts)):
        length = held.seq_lens[number]
        blocks = held.block_table[number, : -(-length // keys.shape[1])].long()
        seen = keys[blocks].view(FP8).float().reshape(-1, indexer.head_dim)[:length]
        seen = seen * scales[blocks].reshape(-1)[:length, None]
        scores = torch.einsum("thd,sd->ths", queries[first:last].float(), seen).relu()
        scores = torch.einsum("ths,th->ts", scores, weights[first:last].float())
        later = torch.arange(length)[None] > held.positions[first:last, None]
        best = scores.masked_fill(later, NOT_SEEN).topk(min(indexer.topk_tokens, length))
        tokens = best.indices.masked_fill(best.values == NOT_SEEN, -1)
        chosen[first:last, : tokens.shape[1]] = tokens.to(torch.int32)
    return chosen


def _write(indexer: Any, held: Metadata, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes of all keys by block and token, and their scales."""
    cache = indexer.k_cache.kv_cache
    num_blocks, size, _ = cache.shape
    of_keys, of_scales = cache.flatten(1).split([size * indexer.head_dim, size * 4], dim=1)
    keys = of_keys.view(num_blocks, size, indexer.head_dim)
    scales = of_scales.view(torch.float32)
    slots = held.slot_mapping.flatten().long()
    values, scale = quantized(new[: len(slots)])
    blocks, places = slots[slots >= 0] // size, slots[slots >= 0] % size
    keys[blocks, places] = values[slots >= 0].view(torch.uint8)
    scales[blocks, places] = scale[slots >= 0, 0]
    return keys, scales
