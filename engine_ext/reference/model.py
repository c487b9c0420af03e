"""A decoder-only transformer: Qwen3, Qwen2, Llama, and DeepSeek-V2 without experts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

from engine_ext.reference.kv_cache import NULL_BLOCK
from engine_ext.reference.model_config import Llama3RopeScaling, ModelConfig
from engine_ext.reference.weights import LayerWeights, ModelWeights


class RotaryEmbedding:
    """Tables of cosine and sine, float32, `[max_positions, rotated_dim]`: what the left and the
    right half of a head are multiplied with, the sines with their signs."""

    def __init__(self, config: ModelConfig, max_positions: int, device: torch.device) -> None:
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), _frequencies(config))
        cos, sin = angles.cos(), angles.sin()
        self._cos = torch.cat((cos, cos), dim=-1).to(device)
        self._sin = torch.cat((-sin, sin), dim=-1).to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine for `positions` [tokens], ready to broadcast over heads."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x`: [tokens, heads, head_dim]."""
    wide = x.float()
    halves_swapped = wide.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(wide * cos, halves_swapped, sin).to(x.dtype)


def _frequencies(config: ModelConfig) -> Tensor:
    exponents = torch.arange(0, config.rotated_dim, 2, dtype=torch.float32) / config.rotated_dim
    frequencies = config.rope_theta**-exponents
    if config.rope_scaling is None:
        return frequencies
    return _stretch_llama3(frequencies, config.rope_scaling)


def _stretch_llama3(frequencies: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Llama 3.1's rule: waves longer than the trained context are stretched by `factor`, short
    ones kept, those between blended linearly in context / wavelength."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


@dataclass(frozen=True, slots=True)
class ChunkInput:
    """Tokens `start .. start + len(token_ids)` of one sequence; `block_ids` cover them all."""

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Gather:
    """Which K and V to bring together, and where."""

    rows: Tensor
    """[sequences * kv_heads * width], of a layer seen as [num_blocks * kv_heads, ...]."""
    scratch: Tensor
    """[len(rows), block_size * row_dim]. All spans and layers use the same memory in turn."""


@dataclass(frozen=True, slots=True)
class DecodeSpan:
    """The first `count` rows of the batch, one token each."""

    count: int
    gather: Gather
    mask: Tensor
    """[count, 1, 1, width * block_size], added to the scores."""


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """Rows `first .. last` of the batch: one sequence's chunk with `context` tokens before it."""

    first: int
    last: int
    context: int
    gather: Gather


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    token_ids: Tensor
    positions: Tensor
    write_rows: Tensor
    """[tokens * kv_heads]: where their K and V go, of a layer seen as [..., row_dim]."""
    decode: DecodeSpan | None
    prefills: tuple[PrefillSpan, ...]
    logit_rows: Tensor
    """The last row of each chunk."""


class BatchBuilder:
    def __init__(self, config: ModelConfig, *, block_size: int, device: torch.device) -> None:
        self._heads = torch.arange(config.num_kv_heads).view(1, -1, 1)
        self._block_size = block_size
        self._device = device
        # Kept over steps: a large buffer comes fresh from the system and costs more in page
        # faults than the attention that reads it.
        self._scratch = torch.empty(
            (0, block_size * config.row_dim), dtype=config.dtype, device=device
        )

    def build(self, chunks: Sequence[ChunkInput]) -> ForwardBatch:
        """`chunks`: those of one token first."""
        positions = [p for c in chunks for p in range(c.start, c.end)]
        ends = torch.tensor([len(c.token_ids) for c in chunks]).cumsum(0)
        decodes = [c for c in chunks if len(c.token_ids) == 1]
        return ForwardBatch(
            token_ids=self._tensor([t for c in chunks for t in c.token_ids]),
            positions=self._tensor(positions),
            write_rows=self._write_rows(chunks),
            decode=self._decode(decodes) if decodes else None,
            prefills=self._prefills(chunks[len(decodes) :], first=len(decodes)),
            logit_rows=(ends - 1).to(self._device),
        )

    def _write_rows(self, chunks: Sequence[ChunkInput]) -> Tensor:
        size, heads = self._block_size, self._heads
        blocks = [c.block_ids[p // size] for c in chunks for p in range(c.start, c.end)]
        offsets = [p % size for c in chunks for p in range(c.start, c.end)]
        rows = torch.tensor(blocks).view(-1, 1) * heads.numel() + heads.view(1, -1)
        return (rows * size + torch.tensor(offsets).view(-1, 1)).flatten().to(self._device)

    def _decode(self, chunks: Sequence[ChunkInput]) -> DecodeSpan:
        width = max(len(c.block_ids) for c in chunks)
        table = [[*c.block_ids, *[NULL_BLOCK] * (width - len(c.block_ids))] for c in chunks]
        beyond = torch.arange(width * self._block_size) >= torch.tensor([[c.end] for c in chunks])
        mask = torch.zeros(beyond.shape).masked_fill_(beyond, float("-inf"))
        return DecodeSpan(
            count=len(chunks),
            gather=self._gather(table),
            mask=mask.view(len(chunks), 1, 1, -1).to(self._device),
        )

    def _prefills(self, chunks: Sequence[ChunkInput], first: int) -> tuple[PrefillSpan, ...]:
        spans = []
        for chunk in chunks:
            last = first + len(chunk.token_ids)
            spans.append(PrefillSpan(first, last, chunk.start, self._gather([chunk.block_ids])))
            first = last
        return tuple(spans)

    def _gather(self, table: Sequence[Sequence[int]]) -> Gather:
        """Head by head: gathered, they are [sequence, head, position] without a second copy."""
        blocks = torch.tensor(table).unsqueeze(1)
        rows = (blocks * self._heads.numel() + self._heads).flatten()
        if len(rows) > len(self._scratch):
            self._scratch = self._scratch.new_empty(len(rows) * 3 // 2, self._scratch.shape[1])
        return Gather(rows.to(self._device), self._scratch[: len(rows)])

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self._device)


_QUERY_TILE = 512
"""Rows of a masked prefill computed at once: bounds the mask to tile * context values."""


@dataclass(frozen=True, slots=True)
class Rows:
    """What stands where in a row of the cache, and what scores are multiplied with."""

    key: slice
    value: slice
    scale: float

    @classmethod
    def of(cls, config: ModelConfig) -> "Rows":
        """A latent vector is key and value at once; the rotated key behind it is only key."""
        scale = config.head_dim**-0.5
        if config.latent is not None:
            return cls(slice(0, config.row_dim), slice(0, config.latent.rank), scale)
        return cls(slice(0, config.head_dim), slice(config.head_dim, config.row_dim), scale)


class PagedAttention:
    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __call__(self, query: Tensor, fresh: Tensor, layer: Tensor, batch: ForwardBatch) -> Tensor:
        """Write this batch's `fresh` rows into `layer`, then attend.

        `query`: [tokens, heads, key]; `fresh`: [tokens, kv_heads, row]; `layer`: [num_blocks,
        kv_heads, block_size, row]. Returns [tokens, heads * value].
        """
        width = layer.shape[-1]
        layer.view(-1, width).index_copy_(0, batch.write_rows, fresh.reshape(-1, width))
        parts = []
        if batch.decode is not None:
            parts.append(self._decode(query[: batch.decode.count], layer, batch.decode))
        for span in batch.prefills:
            rows = slice(span.first, span.last)
            if span.context:
                parts.append(self._continue(query[rows], layer, span))
            else:
                parts.append(self._begin(query[rows], fresh[rows]))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _decode(self, query: Tensor, layer: Tensor, span: DecodeSpan) -> Tensor:
        """The query heads that share a K and V head take the place of query positions."""
        key, value = self._gather(layer, span.gather, span.count)
        grouped = query.view(span.count, layer.shape[1], -1, query.shape[-1])
        mask = span.mask.to(query.dtype)
        out = F.scaled_dot_product_attention(
            grouped, key, value, attn_mask=mask, scale=self._rows.scale
        )
        return out.reshape(span.count, -1)

    def _begin(self, query: Tensor, fresh: Tensor) -> Tensor:
        q, rows = (x.transpose(0, 1).unsqueeze(0) for x in (query, fresh))
        key, value = self._split(rows)
        return _flat(
            F.scaled_dot_product_attention(
                q, key, value, is_causal=True, scale=self._rows.scale, enable_gqa=True
            )
        )

    def _continue(self, query: Tensor, layer: Tensor, span: PrefillSpan) -> Tensor:
        key, value = self._gather(layer, span.gather, 1)
        parts = []
        for first in range(0, query.shape[0], _QUERY_TILE):
            tile = query[first : first + _QUERY_TILE]
            seen = span.context + first + tile.shape[0]
            parts.append(self._attend_last(tile, key[:, :, :seen], value[:, :, :seen]))
        return torch.cat(parts)

    def _attend_last(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`query` holds the last positions of `key`; row i sees all keys up to its own position."""
        rows, seen = query.shape[0], key.shape[2]
        mask = torch.ones(rows, seen, dtype=torch.bool, device=query.device).tril(seen - rows)
        q = query.transpose(0, 1).unsqueeze(0)
        return _flat(
            F.scaled_dot_product_attention(
                q, key, value, attn_mask=mask, scale=self._rows.scale, enable_gqa=True
            )
        )

    def _gather(self, layer: Tensor, gather: Gather, count: int) -> tuple[Tensor, Tensor]:
        """K and V, each [count, kv_heads, positions, ...], until the next gather."""
        _, kv_heads, block_size, width = layer.shape
        torch.index_select(layer.view(-1, block_size * width), 0, gather.rows, out=gather.scratch)
        return self._split(gather.scratch.view(count, kv_heads, -1, width))

    def _split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return rows[..., self._rows.key], rows[..., self._rows.value]


def _flat(out: Tensor) -> Tensor:
    """[1, heads, tokens, value] -> [tokens, heads * value]"""
    return out.squeeze(0).transpose(0, 1).flatten(1)


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
