"""A decoder-only transformer over a paged cache: Qwen3, Llama, and DeepSeek-V2 without experts. A
batch has the sequences that decode first, then prefill chunks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

from engine_ext.reference.kv_cache import NULL_BLOCK
from engine_ext.reference.model_config import ModelConfig
from engine_ext.reference.weights import LayerWeights, ModelWeights


@dataclass(frozen=True, slots=True)
class ChunkInput:
    """Tokens `start .. start + len(token_ids)` of one sequence; `block_ids` cover them all."""

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]

    @property
    def positions(self) -> range:
        return range(self.start, self.start + len(self.token_ids))


@dataclass(frozen=True, slots=True)
class DecodeSpan:
    """The first `count` rows of the batch, one token each."""

    count: int
    cache_rows: Tensor
    """[count * kv_heads * width]: the K and V to bring together, of a layer seen as [num_blocks *
    kv_heads, ...]."""
    mask: Tensor
    """[count, 1, 1, width * block_size], added to the scores."""


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """These rows of the batch are one sequence's chunk with `context` tokens before it."""

    rows: slice
    context: int
    cache_rows: Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    token_ids: Tensor
    positions: Tensor
    write_rows: Tensor
    """[tokens * kv_heads]: the places of their K and V in a layer seen as [..., row_dim]."""
    decode: DecodeSpan | None
    prefills: tuple[PrefillSpan, ...]
    logit_rows: Tensor
    """The last row of each chunk."""


class BatchBuilder:
    def __init__(self, config: ModelConfig, *, block_size: int, device: torch.device) -> None:
        self._heads = torch.arange(config.num_kv_heads).view(1, -1, 1)
        self._block_size = block_size
        self._device = device

    def build(self, chunks: Sequence[ChunkInput]) -> ForwardBatch:
        """`chunks`: those of one token first."""
        decodes = [chunk for chunk in chunks if len(chunk.token_ids) == 1]
        first, prefills = len(decodes), []
        for chunk in chunks[len(decodes) :]:
            last = first + len(chunk.token_ids)
            rows = self._cache_rows([chunk.block_ids])
            prefills.append(PrefillSpan(slice(first, last), chunk.start, rows))
            first = last
        ends = torch.tensor([len(chunk.token_ids) for chunk in chunks]).cumsum(0)
        return ForwardBatch(
            token_ids=self._tensor([token for chunk in chunks for token in chunk.token_ids]),
            positions=self._tensor([place for chunk in chunks for place in chunk.positions]),
            write_rows=self._write_rows(chunks),
            decode=self._decode(decodes) if decodes else None,
            prefills=tuple(prefills),
            logit_rows=(ends - 1).to(self._device),
        )

    def _write_rows(self, chunks: Sequence[ChunkInput]) -> Tensor:
        size, heads = self._block_size, self._heads
        blocks = [c.block_ids[p // size] for c in chunks for p in c.positions]
        offsets = [p % size for c in chunks for p in c.positions]
        rows = torch.tensor(blocks).view(-1, 1) * heads.numel() + heads.view(1, -1)
        return (rows * size + torch.tensor(offsets).view(-1, 1)).flatten().to(self._device)

    def _decode(self, chunks: Sequence[ChunkInput]) -> DecodeSpan:
        width = max(len(c.block_ids) for c in chunks)
        table = [[*c.block_ids, *[NULL_BLOCK] * (width - len(c.block_ids))] for c in chunks]
        lengths = torch.tensor([[c.positions.stop] for c in chunks])
        beyond = torch.arange(width * self._block_size) >= lengths
        mask = torch.zeros(beyond.shape).masked_fill_(beyond, float("-inf"))
        mask = mask.view(len(chunks), 1, 1, -1).to(self._device)
        return DecodeSpan(len(chunks), self._cache_rows(table), mask)

    def _cache_rows(self, table: Sequence[Sequence[int]]) -> Tensor:
        """Head by head: gathered, they are [sequence, head, position] without a second copy."""
        blocks = torch.tensor(table).unsqueeze(1)
        return (blocks * self._heads.numel() + self._heads).flatten().to(self._device)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self._device)


def rotary_tables(
    config: ModelConfig, max_positions: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Rotary position embedding (Su et al., 2021, arXiv:2104.09864), the half-split form of Llama:
    cosine and sine, float32, [max_positions, 1, rotated_dim], the factors of the left and the right
    half of a head, the sines with their signs."""
    exponents = torch.arange(0, config.rotated_dim, 2, dtype=torch.float32) / config.rotated_dim
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, config.rope_theta**-exponents).unsqueeze(1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1).to(device), torch.cat((-sin, sin), dim=-1).to(device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x`: [tokens, heads, head_dim]."""
    wide = x.float()
    halves_swapped = wide.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(wide * cos, halves_swapped, sin).to(x.dtype)


class PagedAttention:
    """Causal attention over a paged cache. A row of the cache is key before value; a latent vector
    is key and value at once, and the rotated key behind it is only key."""

    def __init__(self, config: ModelConfig) -> None:
        self._scale = config.head_dim**-0.5
        latent, dim, width = config.latent, config.head_dim, config.row_dim
        self._key = slice(0, width if latent else dim)
        self._value = slice(0, latent.rank) if latent else slice(dim, width)
        # Kept over layers and steps: a large buffer comes fresh from the system and costs more in
        # page faults than the attention that reads it.
        self._scratch = torch.empty(0)

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
        parts += [self._prefill(query[span.rows], layer, span) for span in batch.prefills]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _decode(self, query: Tensor, layer: Tensor, span: DecodeSpan) -> Tensor:
        """The query heads that share a K and V head take the place of query positions."""
        key, value = self._gather(layer, span.cache_rows, span.count)
        grouped = query.view(span.count, layer.shape[1], -1, query.shape[-1])
        mask = span.mask.to(query.dtype)
        out = F.scaled_dot_product_attention(grouped, key, value, mask, scale=self._scale)
        return out.reshape(span.count, -1)

    def _prefill(self, query: Tensor, layer: Tensor, span: PrefillSpan) -> Tensor:
        """`query` holds the last positions; row i sees all keys up to its own position."""
        key, value = self._gather(layer, span.cache_rows, 1)
        rows, seen, mask = len(query), span.context + len(query), None
        if span.context:
            mask = torch.ones(rows, seen, dtype=torch.bool, device=query.device).tril(span.context)
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0),
            key[:, :, :seen],
            value[:, :, :seen],
            mask,
            is_causal=mask is None,
            scale=self._scale,
            enable_gqa=True,
        )
        return out.squeeze(0).transpose(0, 1).flatten(1)

    def _gather(self, layer: Tensor, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """K and V, each [count, kv_heads, positions, ...], until the next gather."""
        _, kv_heads, block_size, width = layer.shape
        size = len(rows) * block_size * width
        if size > len(self._scratch):
            self._scratch = layer.new_empty(size * 3 // 2)
        scratch = self._scratch[:size].view(len(rows), -1)
        torch.index_select(layer.view(-1, block_size * width), 0, rows, out=scratch)
        gathered = scratch.view(count, kv_heads, -1, width)
        return gathered[..., self._key], gathered[..., self._value]


class Decoder:
    """`max_positions`: most tokens of a sequence."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, max_positions: int) -> None:
        self._config = config
        self._weights = weights
        self._cos, self._sin = rotary_tables(config, max_positions, weights.norm.device)
        self._attend = PagedAttention(config)
        self._project = self._project_latent if config.latent else self._project_heads
        self._eps = torch.tensor(config.rms_norm_eps, device=weights.norm.device)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, layers: Sequence[Tensor]) -> Tensor:
        cos, sin = self._cos[batch.positions], self._sin[batch.positions]
        hidden = F.embedding(batch.token_ids, self._weights.embedding)
        for weights, cache in zip(self._weights.layers, layers, strict=True):
            normed = self._norm(hidden, weights.input_norm)
            query, row = self._project(normed, weights, cos, sin)
            mixed = self._attend(query, row, cache, batch)
            hidden = hidden + _product(mixed, weights.output)
            normed = self._norm(hidden, weights.mlp_norm)
            gate, up = _product(normed, weights.gate_up).chunk(2, dim=-1)
            hidden = hidden + _product(F.silu(gate).mul_(up), weights.down)
        last = self._norm(hidden[batch.logit_rows], self._weights.norm)
        return _product(last, self._weights.head).float()

    def _project_heads(
        self, x: Tensor, weights: LayerWeights, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Queries, and what the cache keeps of these tokens: K before V."""
        config = self._config
        num_rotated = config.num_heads + config.num_kv_heads
        packed = _product(x, weights.qkv).view(x.shape[0], -1, config.head_dim)
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


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """As `F.linear`. For a single row of 16 bits, that is for one sequence's decode on a CPU,
    `F.linear` is no faster than with float32; the product of matrix and vector is."""
    if x.shape[0] == 1 and x.dtype is not torch.float32 and not x.is_cuda:
        return torch.mv(weight, x[0]).unsqueeze(0)
    return F.linear(x, weight)
