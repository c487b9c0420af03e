"""What one forward pass computes, as tensors. Decodes come first, then prefill chunks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_ext.reference.kv_cache import NULL_BLOCK
from engine_ext.reference.model_config import ModelConfig


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
