"""What our plugin adds to vLLM's HTTP server: `GET /disagg/identity`, `POST /disagg/release` and
`GET /disagg/leases`.

vLLM's own place for pages, `vllm.endpoint_plugins`, wants to be named in VLLM_PLUGINS, which would
switch off every plugin that is not; so the hook that calls those plugins is wrapped instead.
"""

import asyncio
import functools
import json
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from vllm.entrypoints.launchers import app as launcher
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.v1.engine.core import EngineCore

from engine_ext.http import identity, leases, release
from engine_ext.vllm import describe
from engine_ext.vllm.compat import features, support
from engine_ext.vllm.connector import inspect_worker, ours_in
from engine_ext.vllm.renders import renders

MARK = "_disagg_pages"
RELEASE = "disagg_release"
LEASES = "disagg_leases"
"""Methods of vLLM's engine process that its HTTP server calls."""
RENDERS = "disagg_renders"
"""Found out once."""
KEY = leases.new_key()
"""Of this process; the engine's is used."""


def install() -> None:
    """Idempotent."""
    setattr(EngineCore, RELEASE, _release_in_engine)
    setattr(EngineCore, LEASES, _leases_in_engine)
    if not hasattr(launcher.attach_endpoint_plugins, MARK):
        launcher.attach_endpoint_plugins = _attaching(launcher.attach_endpoint_plugins)


def _attaching(original: Any) -> Any:
    @functools.wraps(original)
    def attach(app: FastAPI, *args: Any, **kwargs: Any) -> None:
        original(app, *args, **kwargs)
        app.add_api_route(identity.PATH, tell_identity, methods=["GET"])
        app.add_api_route(release.PATH, release_kv, methods=["POST"])
        app.add_api_route(leases.PATH, tell_leases, methods=["GET"])

    setattr(attach, MARK, True)
    return attach


async def tell_identity(request: Request) -> JSONResponse:
    try:
        return JSONResponse(await run_in_threadpool(_identity, request.app.state))
    except (identity.IdentityError, ValueError) as error:
        return _error(str(error), HTTPStatus.SERVICE_UNAVAILABLE)


def _identity(state: Any) -> dict[str, Any]:
    """Blocks. Raises as `identity` does."""
    known = getattr(state, RENDERS, None)
    if known is None:
        known = renders(state) if support.is_on(features.RENDERS) else {}
        setattr(state, RENDERS, known)
    return identity.identity(replace(describe.engine(state.vllm_config), renders=known))


async def release_kv(request: Request) -> JSONResponse:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > release.MAX_BODY:
            return _error("the body is too large", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    try:
        names = release.parse(json.loads(body))
    except (ValueError, RecursionError) as error:  # JSON's own included
        return _error(str(error), HTTPStatus.BAD_REQUEST)
    answers = await _core(request.app.state).call_utility_all_async(RELEASE, *names)
    return JSONResponse({"released": any(answers)})


async def tell_leases(request: Request) -> JSONResponse:
    asked = request.query_params.get(leases.ASKED)
    try:
        async with asyncio.timeout(leases.ANSWER_SECONDS):
            answers = await _core(request.app.state).call_utility_all_async(LEASES, asked)
    except TimeoutError:
        return _error("the engine's step takes too long", HTTPStatus.SERVICE_UNAVAILABLE)
    ranks = [
        {**rank, "dp_rank": number} if isinstance(rank, dict) else rank
        for number, of_engine in enumerate(answers)
        for rank in of_engine
    ]
    problems = [each for each in ranks if isinstance(each, str)]
    if problems:
        return _error(problems[0], HTTPStatus.SERVICE_UNAVAILABLE)
    return JSONResponse(leases.page(ranks))


def _core(state: Any) -> Any:
    return state.engine_client.engine_core


def _leases_in_engine(core: Any, asked: str | None) -> list[dict[str, Any] | str]:
    """Of each of its workers: dicts, or words where one cannot say.

    No deadline of its own: an answer that nobody waited for would be taken for the next call's. A
    worker answers within a second, or between two steps.
    """
    if ours_in(getattr(core.scheduler, "connector", None)) is None:
        return []
    found: list[dict[str, Any] | str] = core.model_executor.collective_rpc(
        inspect_worker, args=(KEY, asked)
    )
    return found


def _release_in_engine(core: Any, engine_id: str, request_id: str) -> bool:
    connector = ours_in(getattr(core.scheduler, "connector", None))
    return connector is not None and connector.release(engine_id, request_id)


def _error(message: str, status: HTTPStatus) -> JSONResponse:
    kind = f"{status.phrase.replace(' ', '')}Error"
    error = create_error_response(message, kind, status)
    return JSONResponse(error.model_dump(), status)
