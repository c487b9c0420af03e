"""One request inside the engine: its tokens, its blocks and how far its KV is computed."""

from collections.abc import Sequence as Seq
from typing import Any

import torch

from engine_ext.common.prefix_hashes import ContentKey, Keys
from engine_ext.common.types import BlockIds
from engine_ext.reference.answer import ResumedAnswer, hands_over
from engine_ext.reference.grammar import Grammar
from engine_ext.reference.messages import Finish, GenerateRequest, SamplingParams, TokenLogprob

REMOTE_CACHED = "remote_prefill_cached_tokens"


class Sequence:
    """Satisfies `engine_ext.common.types.EngineRequest`. Its state is the scheduler's queue that it
    is in, never a flag here."""

    def __init__(self, request: GenerateRequest, resumed: ResumedAnswer | None = None) -> None:
        self.request_id = request.request_id
        self.kv_transfer_params: Any = request.kv_transfer_params
        self.sampling: SamplingParams = request.sampling
        self.cache_hit_threshold = request.cache_hit_threshold
        self.prompt_token_ids: Seq[int] = request.prompt_token_ids
        salt = request.cache_salt
        self.content_keys: Keys = () if salt is None else (ContentKey("cache_salt", (salt,)),)
        """This engine has neither media nor adapters."""
        self.token_ids: list[int] = list(request.prompt_token_ids)
        seed = request.sampling.seed
        self.generator = None if seed is None else torch.Generator().manual_seed(seed % 2**63)
        self.constraint: Grammar | None = None
        self.num_sent_tokens = 0
        """Tokens of the answer that the client had before the request came."""
        self.hands_over = hands_over(request.kv_transfer_params)
        self.output_logprobs: list[TokenLogprob] = []
        """From `num_sent_tokens` on, of an answer that is handed over."""
        if resumed is not None:
            self.token_ids += resumed.token_ids
            self.num_sent_tokens = resumed.num_sent
            self.constraint = resumed.constraint
            self.output_logprobs += resumed.logprobs if self.hands_over else ()
        elif request.sampling.grammar is not None:
            self.constraint = request.sampling.grammar.start()
        self.queued_at = 0.0
        """When it came into the scheduler's queue, by the engine's clock."""
        self.num_computed_tokens = 0
        self.num_external_tokens = 0
        """Tokens a remote load brings, or brought, into the blocks."""
        self.block_ids: list[int] = []
        self.num_committed_blocks = 0
        """Leading blocks that the prefix cache was offered."""
        self.digests: list[bytes] = []
        """Chained digests of the leading full blocks, as far as they were needed."""
        self.num_prefix_hit_tokens: int | None = None
        """Local prefix-cache hit at first admission; None before it."""
        self.num_cached_tokens = 0
        self.finish: Finish | None = None
        self.kv_transfer_answer: dict[str, Any] | None = None
        self.load_failure: dict[str, Any] | None = None
        """For its answer, see engine_ext.common.load_failure."""

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
        """Prompt tokens that no engine computed for this request.

        A prefill engine whose KV is loaded reports how many its caches held, in vLLM's word. If it
        does not (push: the request comes before P knows), only our own cache's hit is certain.
        """
        params = self.kv_transfer_params
        if not isinstance(params, dict) or params.get("do_remote_prefill") is not True:
            return self.num_cached_tokens
        reported = params.get(REMOTE_CACHED)
        if type(reported) is not int or reported < 0:
            return self.num_prefix_hit_tokens or 0
        return min(reported, self.num_cached_tokens)

    def blocks_by_group(self) -> BlockIds:
        return (tuple(self.block_ids),)
