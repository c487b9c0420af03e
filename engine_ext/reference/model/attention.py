"""Causal attention over a paged cache, for batches that mix decodes and prefill chunks."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

from engine_ext.reference.model.batch import DecodeSpan, ForwardBatch, Gather, PrefillSpan
from engine_ext.reference.model_config import ModelConfig

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
