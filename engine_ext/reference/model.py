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
class AttentionSpan:
    """Rows of the batch that attend together: one chunk, or all the sequences that decode."""

    rows: slice
    count: int
    """Sequences; each has as many rows as the others."""
    cache_rows: Tensor
    """[count * kv_heads * width]: the K and V to bring together, of a layer seen as [num_blocks *
    kv_heads, ...]."""
    mask: Tensor
    """[count, 1, heads per kv_head * length, width * block_size], added to the scores."""


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    token_ids: Tensor
    positions: Tensor
    write_rows: Tensor
    """[tokens * kv_heads]: the places of their K and V in a layer seen as [..., row_dim]."""
    spans: tuple[AttentionSpan, ...]
    logit_rows: Tensor
    """The last row of each chunk."""


class BatchBuilder:
    def __init__(self, config: ModelConfig, *, block_size: int, device: torch.device) -> None:
        self._heads = torch.arange(config.num_kv_heads).view(1, -1, 1)
        self._group = config.num_heads // config.num_kv_heads
        self._dtype = config.dtype
        self._block_size = block_size
        self._device = device

    def build(self, chunks: Sequence[ChunkInput]) -> ForwardBatch:
        """`chunks`: those of one token first."""
        decodes = [chunk for chunk in chunks if len(chunk.token_ids) == 1]
        groups = [[chunk] for chunk in chunks[len(decodes) :]]
        spans: list[AttentionSpan] = []
        for group in [decodes, *groups] if decodes else groups:
            spans.append(self._span(group, spans[-1].rows.stop if spans else 0))
        ends = torch.tensor([len(chunk.token_ids) for chunk in chunks]).cumsum(0)
        return ForwardBatch(
            token_ids=self._tensor([token for chunk in chunks for token in chunk.token_ids]),
            positions=self._tensor([place for chunk in chunks for place in chunk.positions]),
            write_rows=self._write_rows(chunks),
            spans=tuple(spans),
            logit_rows=(ends - 1).to(self._device),
        )

    def _write_rows(self, chunks: Sequence[ChunkInput]) -> Tensor:
        size, heads = self._block_size, self._heads
        blocks = [c.block_ids[p // size] for c in chunks for p in c.positions]
        offsets = [p % size for c in chunks for p in c.positions]
        rows = torch.tensor(blocks).view(-1, 1) * heads.numel() + heads.view(1, -1)
        return (rows * size + torch.tensor(offsets).view(-1, 1)).flatten().to(self._device)

    def _span(self, chunks: Sequence[ChunkInput], first: int) -> AttentionSpan:
        """`chunks` of one length; `first` is their first row in the batch."""
        width = max(len(chunk.block_ids) for chunk in chunks)
        table = [[*c.block_ids, *[NULL_BLOCK] * (width - len(c.block_ids))] for c in chunks]
        blocks = torch.tensor(table).unsqueeze(1)
        # Head by head: gathered, they are [sequence, head, position] without a second copy.
        cache_rows = (blocks * self._heads.numel() + self._heads).flatten()
        positions = torch.tensor([list(chunk.positions) for chunk in chunks], device=self._device)
        places = torch.arange(width * self._block_size, device=self._device)
        unseen = (places > positions.unsqueeze(-1)).repeat(1, self._group, 1)
        mask = torch.zeros(unseen.shape, dtype=self._dtype, device=self._device)
        return AttentionSpan(
            rows=slice(first, first + positions.numel()),
            count=len(chunks),
            cache_rows=cache_rows.to(self._device),
            mask=mask.masked_fill_(unseen, float("-inf")).unsqueeze(1),
        )

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self._device)


def rotary_tables(
    config: ModelConfig, max_positions: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Rotary position embedding (Su et al., 2021, arXiv:2104.09864), the half-split form of Llama:
    cosine and sine, float32, [max_positions, 1, rotated], the factors of the left and the right
    half of a head, the sines with their signs."""
    dim = config.latent.rotated if config.latent else config.head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
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
        parts = [self._attend(query[span.rows], layer, span) for span in batch.spans]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _attend(self, query: Tensor, layer: Tensor, span: AttentionSpan) -> Tensor:
        """The query heads that share a K and V head take the place of query positions."""
        key, value = self._gather(layer, span.cache_rows, span.count)
        kv_heads = layer.shape[1]
        grouped = query.view(span.count, -1, kv_heads, query.shape[1] // kv_heads, query.shape[2])
        grouped = grouped.permute(0, 2, 3, 1, 4)
        out = F.scaled_dot_product_attention(
            grouped.flatten(2, 3), key, value, span.mask, scale=self._scale
        )
        out = out.view(*grouped.shape[:4], -1).permute(0, 3, 1, 2, 4)
        return out.reshape(len(query), -1)

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
            gate = F.silu(_product(normed, weights.gate))
            up = _product(normed, weights.up)
            hidden = hidden + _product(gate.mul_(up), weights.down)
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
