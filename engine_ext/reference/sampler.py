"""Choosing the next token of each sequence from its logits."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_ext.reference.messages import SamplingParams, TokenLogprob
from engine_ext.reference.sequence import Sequence

_GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprob: TokenLogprob | None


class Sampler:
    """A row's token depends on that row alone and on its own generator, never on its batch."""

    def __init__(self, *, seed: int, eos_token_ids: frozenset[int]) -> None:
        self._shared_generator = torch.Generator().manual_seed(seed)
        self._eos_token_ids = eos_token_ids

    @torch.inference_mode()
    def sample(self, logits: Tensor, sequences: Seq[Sequence]) -> list[SampledToken | None]:
        """`logits`: [sequences, vocab], float32. None for a row that is not finite.

        Log-probabilities are those of the model's own distribution, before `min_tokens`,
        temperature and truncation (vLLM's `raw_logprobs`).
        """
        finite = logits.isfinite().all(dim=-1).tolist()
        allowed = self._mask(logits, sequences)
        tokens: list[int] = allowed.argmax(dim=-1).tolist()
        for row, seq in enumerate(sequences):
            if finite[row] and seq.sampling.temperature >= _GREEDY_BELOW:
                generator = seq.generator or self._shared_generator
                tokens[row] = _draw(allowed[row], seq.sampling, generator)
        logprobs = _logprobs(logits, tokens, sequences)
        return [
            SampledToken(token, logprobs.get(row)) if finite[row] else None
            for row, token in enumerate(tokens)
        ]

    def _mask(self, logits: Tensor, sequences: Seq[Sequence]) -> Tensor:
        """No stop token before `min_tokens` are reached, and no token that a sequence's grammar
        forbids. If an answer is complete before it may stop, its grammar has the last word."""
        masked = logits
        for row, seq in enumerate(sequences):
            must_go_on = seq.num_output_tokens < seq.sampling.min_tokens
            if not must_go_on and seq.constraint is None:
                continue
            chosen = logits[row]
            if must_go_on:
                chosen = chosen.clone()
                chosen[list(self._eos_token_ids)] = float("-inf")
            if seq.constraint is not None:
                forbidden = ~seq.constraint.allowed(len(chosen)).to(logits.device)
                chosen = chosen.masked_fill(forbidden, float("-inf"))
                if bool(chosen.isneginf().all()):
                    chosen = logits[row].masked_fill(forbidden, float("-inf"))
            masked = logits.clone() if masked is logits else masked
            masked[row] = chosen
        return masked


def skip_draws(seq: Sequence, num_tokens: int) -> None:
    """Advance the generator of `seq` as if its first `num_tokens` had been drawn here."""
    if seq.generator is not None and seq.sampling.temperature >= _GREEDY_BELOW:
        torch.rand(num_tokens, generator=seq.generator, dtype=torch.float64)


def _draw(logits: Tensor, sampling: SamplingParams, generator: torch.Generator) -> int:
    """Inverse transform sampling over the tokens that top_k and top_p keep, best first."""
    scaled = logits / sampling.temperature
    point = float(torch.rand(1, generator=generator, dtype=torch.float64))
    ordered, ids = scaled.topk(min(sampling.top_k or scaled.numel(), scaled.numel()))
    cumulative = ordered.softmax(dim=-1, dtype=torch.float64).cumsum(dim=-1).cpu()
    nucleus = min(int(torch.searchsorted(cumulative, sampling.top_p)), len(cumulative) - 1)
    reach = point * float(cumulative[nucleus])
    return int(ids[min(int(torch.searchsorted(cumulative, reach, right=True)), nucleus)])


def _logprobs(
    logits: Tensor, tokens: Seq[int], sequences: Seq[Sequence]
) -> dict[int, TokenLogprob]:
    """By row, for the rows that ask."""
    asked = {
        row: seq.sampling.logprobs
        for row, seq in enumerate(sequences)
        if seq.sampling.logprobs is not None
    }
    if not asked:
        return {}
    rows = logits[list(asked)].log_softmax(dim=-1)
    best, ids = rows.topk(min(max(asked.values()), logits.shape[-1]))
    return {
        row: TokenLogprob(
            token_id=tokens[row],
            logprob=float(rows[i, tokens[row]]),
            top=tuple(zip(ids[i, :count].tolist(), best[i, :count].tolist(), strict=True)),
        )
        for i, (row, count) in enumerate(asked.items())
    }
