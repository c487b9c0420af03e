"""What our plugin adds to vLLM's HTTP server: `GET /disagg/identity` and `POST /disagg/release`.

vLLM's own place for pages, `vllm.endpoint_plugins`, wants to be named in VLLM_PLUGINS, which would
switch off every plugin that is not; so the hook that calls those plugins is wrapped instead.
"""

import functools
import json
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from vllm.entrypoints.launchers import app as launcher
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.v1.engine.core import EngineCore

from engine_ext.pages import identity, release
from engine_ext.vllm import describe
from engine_ext.vllm.connector import DisaggConnector

MARK = "_disagg_pages"
UTILITY = "disagg_release"
"""The method of vLLM's engine process that its HTTP server calls."""


def install() -> None:
    """Idempotent."""
    setattr(EngineCore, UTILITY, _release_in_engine)
    if not hasattr(launcher.attach_endpoint_plugins, MARK):
        launcher.attach_endpoint_plugins = _attaching(launcher.attach_endpoint_plugins)


def _attaching(original: Any) -> Any:
    @functools.wraps(original)
    def attach(app: FastAPI, *args: Any, **kwargs: Any) -> None:
        original(app, *args, **kwargs)
        app.add_api_route(identity.PATH, tell_identity, methods=["GET"])
        app.add_api_route(release.PATH, release_kv, methods=["POST"])

    setattr(attach, MARK, True)
    return attach


async def tell_identity(request: Request) -> JSONResponse:
    try:
        engine = describe.engine(request.app.state.vllm_config)
        return JSONResponse(await run_in_threadpool(identity.identity, engine))
    except (identity.IdentityError, ValueError) as error:
        return _error(str(error), HTTPStatus.SERVICE_UNAVAILABLE)


async def release_kv(request: Request) -> JSONResponse:
    try:
        names = release.parse(json.loads(await request.body()))
    except ValueError as error:  # JSON's own included
        return _error(str(error), HTTPStatus.BAD_REQUEST)
    core = request.app.state.engine_client.engine_core
    answers = await core.call_utility_all_async(UTILITY, *names)
    return JSONResponse({"released": any(answers)})


def _release_in_engine(core: Any, engine_id: str, request_id: str) -> bool:
    connector = getattr(core.scheduler, "connector", None)
    return isinstance(connector, DisaggConnector) and connector.release(engine_id, request_id)


def _error(message: str, status: HTTPStatus) -> JSONResponse:
    kind = f"{status.phrase.replace(' ', '')}Error"
    error = create_error_response(message, kind, status)
    return JSONResponse(error.model_dump(), status)
