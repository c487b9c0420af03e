"""A decoder-only transformer: Qwen3, Qwen2 and Llama."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

from engine_ext.reference.model.attention import paged_attention
from engine_ext.reference.model.batch import ForwardBatch
from engine_ext.reference.model.rope import RotaryEmbedding, rotate
from engine_ext.reference.model_config import ModelConfig
from engine_ext.reference.weights import LayerWeights, ModelWeights


class LanguageModel(Protocol):
    def forward(self, batch: ForwardBatch, layers: Sequence[Tensor]) -> Tensor:
        """Fill the blocks that `batch` names in `layers`; return logits [chunks, vocab], float32,
        for the last token of each chunk."""


class Decoder:
    def __init__(self, config: ModelConfig, weights: ModelWeights, rope: RotaryEmbedding) -> None:
        self._config = config
        self._weights = weights
        self._rope = rope

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, layers: Sequence[Tensor]) -> Tensor:
        cos, sin = self._rope.at(batch.positions)
        hidden = F.embedding(batch.token_ids, self._weights.embedding)
        for weights, cache in zip(self._weights.layers, layers, strict=True):
            normed = self._norm(hidden, weights.input_norm)
            hidden = hidden + self._attention(normed, weights, cache, cos, sin, batch)
            hidden = hidden + _mlp(self._norm(hidden, weights.mlp_norm), weights)
        last = self._norm(hidden[batch.logit_rows], self._weights.norm)
        return F.linear(last, self._weights.head).float()

    def _attention(
        self,
        x: Tensor,
        weights: LayerWeights,
        cache: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
    ) -> Tensor:
        config = self._config
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        packed = F.linear(x, weights.qkv, weights.qkv_bias).view(x.shape[0], -1, config.head_dim)
        query, key, value = torch.split(packed, heads, dim=1)
        if weights.query_norm is not None and weights.key_norm is not None:
            query, key = self._norm(query, weights.query_norm), self._norm(key, weights.key_norm)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        mixed = paged_attention(query, key, value, cache, batch)
        return F.linear(mixed, weights.output, weights.output_bias)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = F.rms_norm(x.float(), weight.shape, weight.float(), self._config.rms_norm_eps)
        return wide.to(x.dtype)


def _mlp(x: Tensor, weights: LayerWeights) -> Tensor:
    gate, up = F.linear(x, weights.gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, weights.down)
