"""`cache_hit_threshold`, top level of a request's body, on its way to the scheduler."""

import functools
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from engine_ext.core.admission import FIELD, parse_threshold

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
        return params

    setattr(to_sampling_params, MARK, True)
    return to_sampling_params
