"""Runs one step's chunks through the model and samples where a sequence reached its end."""

from collections.abc import Sequence as Seq

import torch

from engine_ext.reference.kv_cache import KVCache
from engine_ext.reference.model import BatchBuilder, ChunkInput, LanguageModel
from engine_ext.reference.sampler import SampledToken, Sampler
from engine_ext.reference.scheduler import Chunk, SchedulerStep
from engine_ext.reference.sequence import Sequence


class ModelRunner:
    def __init__(
        self, model: LanguageModel, cache: KVCache, builder: BatchBuilder, sampler: Sampler
    ) -> None:
        self._model = model
        self._cache = cache
        self._builder = builder
        self._sampler = sampler

    def run(self, step: SchedulerStep) -> dict[Sequence, SampledToken | None]:
        """The next token of each chunk that reaches its sequence's end; None for broken logits.

        When this returns, the KV of the step is in memory, for any reader.
        """
        chunks = sorted(step.chunks, key=lambda chunk: chunk.num_tokens > 1)
        self._cache.zero(step.fresh_blocks)
        size = self._cache.block_size
        batch = self._builder.build([_input(chunk, size) for chunk in chunks])
        logits = self._model.forward(batch, self._cache.layers)
        rows = [i for i, chunk in enumerate(chunks) if chunk.reaches_end]
        sequences = [chunks[i].seq for i in rows]
        sampled = self._sample(logits, rows, sequences)
        if logits.is_cuda:
            torch.cuda.current_stream(logits.device).synchronize()
        return dict(zip(sequences, sampled, strict=True))

    def _sample(
        self, logits: torch.Tensor, rows: list[int], sequences: Seq[Sequence]
    ) -> list[SampledToken | None]:
        return self._sampler.sample(logits[rows], sequences) if rows else []


def _input(chunk: Chunk, block_size: int) -> ChunkInput:
    seq, start = chunk.seq, chunk.seq.num_computed_tokens
    num_blocks = -(-chunk.end // block_size)
    return ChunkInput(seq.token_ids[start : chunk.end], start, seq.block_ids[:num_blocks])
