"""One request inside the engine: its tokens, its blocks and how far its KV is computed."""

from collections.abc import Sequence as Seq
from typing import Any

import torch

from engine_ext.common.prefix_hashes import Keys
from engine_ext.common.types import BlockIds
from engine_ext.reference.messages import (
    Finish,
    GenerateRequest,
    SamplingParams,
    TokenLogprob,
)
from engine_ext.reference.resume import Beginning, hands_over

REMOTE_CACHED = "remote_prefill_cached_tokens"


class Sequence:
    """Satisfies `engine_ext.common.types.EngineRequest`. Where it stands is told by the scheduler's
    containers, never by a flag here."""

    def __init__(self, request: GenerateRequest, begun: Beginning | None = None) -> None:
        self.request_id = request.request_id
        self.kv_transfer_params: Any = request.kv_transfer_params
        self.sampling: SamplingParams = request.sampling
        self.cache_hit_threshold = request.cache_hit_threshold
        self.is_only = request.is_only
        self.prompt_token_ids: Seq[int] = request.prompt_token_ids
        self.content_keys: Keys = ()
        """This engine has neither media nor adapters nor salts."""
        self.token_ids: list[int] = list(request.prompt_token_ids)
        self.generator = _generator(request.sampling.seed)
        self.constraint = None
        self.num_spoken_tokens = 0
        """Of the answer, what the client had before the request came."""
        self.hands_over = hands_over(request.kv_transfer_params)
        self.output_logprobs: list[TokenLogprob] = []
        """From `num_spoken_tokens` on, of an answer that is handed over."""
        grammar = request.sampling.grammar
        if begun is not None:
            self._take(begun)
        elif grammar is not None:
            self.constraint = grammar.start()
        self.num_computed_tokens = 0
        self.num_external_tokens = 0
        """Tokens a remote load brings, or brought, into the blocks."""
        self.block_ids: list[int] = []
        self.num_committed_blocks = 0
        """Leading blocks that the prefix cache was offered."""
        self.digests: list[bytes] = []
        """Chained digests of the leading full blocks, as far as somebody asked for them."""
        self.num_prefix_hit_tokens: int | None = None
        """Local prefix-cache hit at first admission; None before it."""
        self.num_cached_tokens = 0
        self.finish: Finish | None = None
        self.kv_transfer_answer: dict[str, Any] | None = None
        self.load_failure: dict[str, Any] | None = None
        """For its answer to say, see engine_ext.common.load_failure."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def num_saved_tokens(self) -> int:
        """Of the prompt, what nobody computed for this request.

        A prefill engine that gave us its KV says how much of it its caches held, in vLLM's word;
        where it does not (push: we are asked before it knows), what our own cache held is certain.
        """
        params = self.kv_transfer_params
        if not isinstance(params, dict) or params.get("do_remote_prefill") is not True:
            return self.num_cached_tokens
        told = params.get(REMOTE_CACHED)
        if type(told) is not int or told < 0:
            return self.num_prefix_hit_tokens or 0
        return min(told, self.num_cached_tokens)

    def _take(self, begun: Beginning) -> None:
        self.token_ids += begun.token_ids
        self.num_spoken_tokens = begun.num_spoken
        self.constraint = begun.constraint
        if self.hands_over:
            self.output_logprobs += begun.logprobs

    def blocks_by_group(self) -> BlockIds:
        return (tuple(self.block_ids),)


def _generator(seed: int | None) -> torch.Generator | None:
    if seed is None:
        return None
    generator = torch.Generator()
    generator.manual_seed(seed % 2**63)
    return generator
