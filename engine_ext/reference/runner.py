"""Runs one step's chunks through the model and samples where a sequence reached its end."""

import torch

from engine_ext.reference.kv_cache import KVCache
from engine_ext.reference.model import BatchBuilder, ChunkInput, LanguageModel
from engine_ext.reference.model_config import ModelConfig
from engine_ext.reference.sampler import SampledToken, Sampler
from engine_ext.reference.scheduler import SchedulerStep
from engine_ext.reference.sequence import Sequence


class ModelRunner:
    def __init__(
        self, config: ModelConfig, model: LanguageModel, cache: KVCache, sampler: Sampler
    ) -> None:
        self._model = model
        self._cache = cache
        self._builder = BatchBuilder(config, block_size=cache.block_size, device=cache.device)
        self._sampler = sampler

    def run(self, step: SchedulerStep) -> dict[Sequence, SampledToken | None]:
        """The next token of each chunk that reaches its sequence's end; None for broken logits.

        When this returns, the KV of the step is in memory, for any reader.
        """
        self._cache.zero(step.fresh_blocks)
        chunks = sorted(step.chunks, key=lambda chunk: chunk.num_tokens > 1)
        inputs = []
        for chunk in chunks:
            seq, start = chunk.seq, chunk.seq.num_computed_tokens
            blocks = seq.block_ids[: -(-chunk.end // self._cache.block_size)]
            inputs.append(ChunkInput(seq.token_ids[start : chunk.end], start, blocks))
        logits = self._model.forward(self._builder.build(inputs), self._cache.layers)
        rows = [i for i, chunk in enumerate(chunks) if chunk.reaches_end]
        sequences = [chunks[i].seq for i in rows]
        sampled = self._sampler.sample(logits[rows], sequences) if rows else []
        if logits.is_cuda:
            torch.cuda.current_stream(logits.device).synchronize()
        return dict(zip(sequences, sampled, strict=True))
