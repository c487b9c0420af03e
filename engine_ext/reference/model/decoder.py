"""A decoder-only transformer: Qwen3, Qwen2, Llama, and DeepSeek-V2 without experts."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

from engine_ext.reference.model.attention import PagedAttention, Rows
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
        self._attend = PagedAttention(Rows.of(config))
        self._project = self._project_latent if config.latent else self._project_heads
        self._eps = torch.tensor(config.rms_norm_eps, device=weights.norm.device)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, layers: Sequence[Tensor]) -> Tensor:
        cos, sin = self._rope.at(batch.positions)
        hidden = F.embedding(batch.token_ids, self._weights.embedding)
        for weights, cache in zip(self._weights.layers, layers, strict=True):
            normed = self._norm(hidden, weights.input_norm)
            hidden = hidden + self._attention(normed, weights, cache, cos, sin, batch)
            hidden = hidden + _mlp(self._norm(hidden, weights.mlp_norm), weights)
        last = self._norm(hidden[batch.logit_rows], self._weights.norm)
        return _product(last, self._weights.head).float()

    def _attention(
        self,
        x: Tensor,
        weights: LayerWeights,
        cache: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
    ) -> Tensor:
        query, row = self._project(x, weights, cos, sin)
        mixed = self._attend(query, row, cache, batch)
        return _product(mixed, weights.output, weights.output_bias)

    def _project_heads(
        self, x: Tensor, weights: LayerWeights, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Queries, and what the cache keeps of these tokens: K before V."""
        config = self._config
        num_rotated = config.num_heads + config.num_kv_heads
        packed = _product(x, weights.qkv, weights.qkv_bias).view(x.shape[0], -1, config.head_dim)
        rotated, value = packed[:, :num_rotated], packed[:, num_rotated:]
        if weights.head_norms is not None:
            rotated = self._norm(rotated, weights.head_norms)
        rotated = rotate(rotated, cos, sin)
        query, key = rotated[:, : config.num_heads], rotated[:, config.num_heads :]
        return query, torch.cat((key, value), dim=-1)

    def _project_latent(
        self, x: Tensor, weights: LayerWeights, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `_project_heads`; a row is the latent vector before the rotated key, for all heads."""
        config = self._config
        assert config.latent is not None
        assert weights.latent_norm is not None
        packed = _product(x, weights.qkv).view(x.shape[0], -1, config.row_dim)
        plain, rotated = packed.tensor_split((config.latent.rank,), dim=-1)
        queries, latent = plain[:, : config.num_heads], plain[:, config.num_heads :]
        plain = torch.cat((queries, self._norm(latent, weights.latent_norm)), dim=1)
        packed = torch.cat((plain, rotate(rotated, cos, sin)), dim=-1)
        return packed[:, : config.num_heads], packed[:, config.num_heads :]

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Root mean square over the last dimension, in float32. Not `F.rms_norm`: on a CPU that
        takes twice as long."""
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps, length, length, value=1 / x.shape[-1]).rsqrt_()
        return (wide * scale).mul_(weight).to(x.dtype)


def _mlp(x: Tensor, weights: LayerWeights) -> Tensor:
    gate, up = _product(x, weights.gate_up).chunk(2, dim=-1)
    return _product(F.silu(gate).mul_(up), weights.down)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `F.linear`, which on a CPU reads 16-bit weights for a single row, that is for one
    sequence's decode, no faster than float32 ones: there it is not the product of matrices."""
    if x.shape[0] > 1 or x.dtype is torch.float32 or x.is_cuda:
        return F.linear(x, weight, bias)
    row = torch.mv(weight, x[0]) if bias is None else torch.addmv(bias, weight, x[0])
    return row.unsqueeze(0)
