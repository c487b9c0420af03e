"""Causal attention over paged K and V, for batches that mix decodes and prefill chunks."""

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

from engine_ext.reference.model.batch import DecodeSpan, ForwardBatch, Gather, PrefillSpan

_QUERY_TILE = 512
"""Rows of a masked prefill computed at once: bounds the mask to tile * context values."""


def paged_attention(
    query: Tensor, key: Tensor, value: Tensor, layer: Tensor, batch: ForwardBatch
) -> Tensor:
    """Write this batch's K and V into `layer`, then attend.

    `query`: [tokens, heads, head_dim]; `key`, `value`: [tokens, kv_heads, head_dim]; `layer`:
    [num_blocks, kv_heads, block_size, 2 * head_dim]. Returns [tokens, heads * head_dim].
    """
    packed = layer.shape[-1]
    fresh = torch.cat((key, value), dim=-1).view(-1, packed)
    layer.view(-1, packed).index_copy_(0, batch.write_rows, fresh)
    parts = []
    if batch.decode is not None:
        parts.append(_decode(query[: batch.decode.count], layer, batch.decode))
    for span in batch.prefills:
        rows = slice(span.first, span.last)
        if span.context:
            parts.append(_continue(query[rows], layer, span))
        else:
            parts.append(_begin(query[rows], key[rows], value[rows]))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _decode(query: Tensor, layer: Tensor, span: DecodeSpan) -> Tensor:
    """The query heads that share a K and V head take the place of query positions."""
    key, value = _gather(layer, span.gather, span.count)
    kv_heads, head_dim = layer.shape[1], query.shape[-1]
    grouped = query.view(span.count, kv_heads, -1, head_dim)
    mask = span.mask.to(query.dtype)
    out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask)
    return out.reshape(span.count, -1)


def _begin(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    return _flat(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))


def _continue(query: Tensor, layer: Tensor, span: PrefillSpan) -> Tensor:
    key, value = _gather(layer, span.gather, 1)
    parts = []
    for first in range(0, query.shape[0], _QUERY_TILE):
        tile = query[first : first + _QUERY_TILE]
        seen = span.context + first + tile.shape[0]
        parts.append(_attend_last(tile, key[:, :, :seen], value[:, :, :seen]))
    return torch.cat(parts)


def _attend_last(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`query` holds the last positions of `key`; row i sees all keys up to its own position."""
    rows, seen = query.shape[0], key.shape[2]
    mask = torch.ones(rows, seen, dtype=torch.bool, device=query.device).tril(seen - rows)
    q = query.transpose(0, 1).unsqueeze(0)
    return _flat(F.scaled_dot_product_attention(q, key, value, attn_mask=mask, enable_gqa=True))


def _gather(layer: Tensor, gather: Gather, count: int) -> tuple[Tensor, Tensor]:
    """K and V, each [count, kv_heads, positions, head_dim], until the next gather."""
    _, kv_heads, block_size, packed = layer.shape
    rows = layer.view(-1, block_size * packed)
    torch.index_select(rows, 0, gather.rows, out=gather.scratch)
    key, value = gather.scratch.view(count, kv_heads, -1, packed).chunk(2, dim=-1)
    return key, value


def _flat(out: Tensor) -> Tensor:
    """[1, heads, tokens, head_dim] -> [tokens, heads * head_dim]"""
    return out.squeeze(0).transpose(0, 1).flatten(1)
