"""Errors of vLLM's HTTP server name the engine from which a prompt's KV could not be loaded.

Our scheduler class puts a load failure (see engine_ext.common.load_failure) into the
`kv_transfer_params` of a request's last result. vLLM takes these into an answer, but drops them if
the result is an error: the client sees only "Internal server error". Both of its servers
get results from `AsyncLLM.generate`, so we wrap that: a failed result of a request that is not
streamed is raised as an exception that carries the failure. `pages.py` registers its handler with
the application. Streams are looked at by patch_streams.

If the servers get results elsewhere, or catch the exception, errors name no engine, and the router
retries without knowing which engine failed.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from vllm.exceptions import GenerationError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from engine_ext.common.load_failure import KEY
from engine_ext.vllm.compat.patching import wrap

MESSAGE = "the KV cache of this request could not be loaded from the remote engine"

STATUS = HTTPStatus.INTERNAL_SERVER_ERROR


class LoadGenerationError(GenerationError):
    """`failure`: in its wire form."""

    def __init__(self, failure: dict[str, Any]) -> None:
        super().__init__(MESSAGE)
        self.failure = failure


def install() -> None:
    """Idempotent."""
    wrap(AsyncLLM, "generate", _wrap_generate)


def add_handler(app: FastAPI) -> None:
    app.add_exception_handler(LoadGenerationError, _error_response)


def _error_response(request: Request, error: Any) -> JSONResponse:
    fields = {"message": MESSAGE, "type": "InternalServerError", "param": None, "code": STATUS}
    return JSONResponse({"error": {**fields, KEY: error.failure}}, STATUS)


def _wrap_generate(original: Any) -> Any:
    def generate(
        self: Any, prompt: Any, sampling_params: Any, request_id: str, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        results: AsyncGenerator[Any, None] = original(
            self, prompt, sampling_params, request_id, *args, **kwargs
        )
        is_streamed = sampling_params.output_kind is RequestOutputKind.DELTA
        return results if is_streamed else _raise_load_failures(results)

    return generate


async def _raise_load_failures(results: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    async with aclosing(results):
        async for result in results:
            failure = (result.kv_transfer_params or {}).get(KEY)
            has_failed = any(output.finish_reason == "error" for output in result.outputs)
            if has_failed and isinstance(failure, dict):
                raise LoadGenerationError(failure)
            yield result
