"""What vLLM's HTTP server leaves out of an error: which engine a prompt's KV could not be loaded
from, and why (see engine_ext.common.load_failure).

Our scheduler class puts it into the `kv_transfer_params` of a request's last result. vLLM takes
those into an answer, and drops them where the result is an error, of which it says no more than
"Internal server error". So results are looked at on their way in, and an error that has a failure
is raised here, with it. Streams are looked at by streams.py.
"""

import functools
from collections.abc import AsyncIterator
from typing import Any

from vllm.entrypoints.openai.chat_completion import serving as chat
from vllm.entrypoints.openai.completion import serving as completion
from vllm.entrypoints.serve.exception_handling.handlers import vllm_error
from vllm.exceptions import GenerationError

from engine_ext.common.load_failure import KEY
from engine_ext.vllm.compat.wrapped import wrap, wrap_in

MESSAGE = "the KV cache of this request could not be loaded from the remote engine"


class LoadGenerationError(GenerationError):
    """`failure`: in its wire form."""

    def __init__(self, failure: dict[str, Any]) -> None:
        super().__init__(MESSAGE)
        self.failure = failure


def failure_in(result: Any) -> dict[str, Any] | None:
    failure = (getattr(result, "kv_transfer_params", None) or {}).get(KEY)
    return failure if isinstance(failure, dict) else None


def require_loaded(result: Any) -> None:
    """Raises LoadGenerationError."""
    failure = failure_in(result)
    if failure is not None and any(output.finish_reason == "error" for output in result.outputs):
        raise LoadGenerationError(failure)


def install() -> None:
    """Idempotent."""
    wrap_in(chat, "chat_completion_full_generator", _of_chat)
    wrap_in(completion, "request_output_to_completion_response", _of_completion)
    wrap(vllm_error, "create_error_response", _saying_more)


def _of_chat(original: Any) -> Any:
    @functools.wraps(original)
    async def generator(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        watched = [_watch(each) if hasattr(each, "__aiter__") else each for each in args]
        if "result_generator" in kwargs:
            kwargs["result_generator"] = _watch(kwargs["result_generator"])
        return await original(self, request, *watched, **kwargs)

    return generator


async def _watch(results: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for result in results:
        require_loaded(result)
        yield result


def _of_completion(original: Any) -> Any:
    @functools.wraps(original)
    def response(self: Any, final_res_batch: list[Any], *args: Any, **kwargs: Any) -> Any:
        for result in final_res_batch:
            require_loaded(result)
        return original(self, final_res_batch, *args, **kwargs)

    return response


def _saying_more(original: Any) -> Any:
    @functools.wraps(original)
    def create(message: Any, *args: Any, **kwargs: Any) -> Any:
        response = original(message, *args, **kwargs)
        if isinstance(message, LoadGenerationError):
            setattr(response.error, KEY, message.failure)
        return response

    return create
