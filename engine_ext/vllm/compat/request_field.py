"""`cache_hit_threshold`, top level of a request's body, what a begun request was given, and that
another cannot begin in the middle, on their way to the scheduler."""

import functools
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from engine_ext.common.resume_payload import KEY
from engine_ext.scheduler.admission import FIELD, parse_threshold
from engine_ext.vllm import given
from engine_ext.vllm.fit import unfit

MARK = "_disagg_field"


def install() -> None:
    """Idempotent."""
    for model in (ChatCompletionRequest, CompletionRequest):
        if not hasattr(model.to_sampling_params, MARK):
            model.to_sampling_params = _carrying(model.to_sampling_params)


def _carrying(original: Any) -> Any:
    """The models keep fields they do not know; sampling params have a place for them."""

    @functools.wraps(original)
    def to_sampling_params(self: Any, *args: Any, **kwargs: Any) -> Any:
        params = original(self, *args, **kwargs)
        # A ValueError here is what vLLM answers 400 to.
        threshold = parse_threshold((self.model_extra or {}).get(FIELD))
        if threshold is not None:
            params.extra_args = {**(params.extra_args or {}), FIELD: threshold}
        _give(self, params)
        return params

    setattr(to_sampling_params, MARK, True)
    return to_sampling_params


def _give(request: Any, params: Any) -> None:
    """`vllm_xargs` come this way too: what is said there is not from us."""
    own = (given.FIELD, given.STAYS)
    extra = {key: value for key, value in (params.extra_args or {}).items() if key not in own}
    begun = given.carried_by(request)
    if begun is not None:
        rest = {key: each for key, each in request.kv_transfer_params.items() if key != KEY}
        extra["kv_transfer_params"] = rest or None
        if begun.output_token_ids:
            extra[given.FIELD] = given.carried(begun)
    if unfit(request):
        extra[given.STAYS] = True
    params.extra_args = extra or None
