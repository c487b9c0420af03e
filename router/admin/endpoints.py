"""The admin API: engines, groups, reload. A FastAPI application for a port of its own.

`AdminGate` stands before the endpoints: it checks the admin token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Path, Request
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from router.admin.control import Control, EngineList, ReloadResult
from router.auth.api_keys import Headers, has_bearer_token
from router.fleet.engine import EngineRole
from router.fleet.sources.file import EngineFileEntry
from router.fleet.views import EngineView, GroupView
from router.openai import fastapi_errors
from router.openai.errors import OperatorError
from router.settings import GROUP_NAME, MAX_GROUP_WEIGHT, SettingsError

T = TypeVar("T")
MAX_BODY_BYTES = 64 * 1024
BODY_TIMEOUT_S = 10.0


class GroupList(BaseModel):
    groups: list[GroupView]


class GroupWeight(msgspec.Struct, forbid_unknown_fields=True):
    weight: Annotated[float, msgspec.Meta(ge=0, le=MAX_GROUP_WEIGHT)]


def control_of(request: Request) -> Control:
    control: Control = request.app.state.control
    return control


TheControl = Annotated[Control, Depends(control_of)]
Name = Annotated[str, Path(description="host:port", max_length=300)]
GroupName = Annotated[str, Path(pattern=rf"^{GROUP_NAME.pattern}$")]
router = APIRouter(prefix="/admin", tags=["Admin"])


def _body(kind: type) -> dict[str, Any]:
    """Describe a body that FastAPI does not parse."""
    _, components = msgspec.json.schema_components([kind])
    schema: dict[str, Any] = components[kind.__name__]
    properties: dict[str, Any] = schema["properties"]
    if "role" in properties:
        properties["role"] = {"type": "string", "enum": list(EngineRole)}
    if "group" in properties:
        properties["group"]["pattern"] = f"^{GROUP_NAME.pattern}$"
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


@router.get("/engines", summary="List the engines, over all processes of the router")
async def engines(control: TheControl) -> EngineList:
    return await control.engines()


@router.post(
    "/engines", status_code=201, summary="Add an engine", openapi_extra=_body(EngineFileEntry)
)
async def add(request: Request, control: TheControl) -> EngineView:
    return await control.add(await _read(request, Any))


@router.get("/engines/{name}", summary="Show one engine")
async def engine(name: Name, control: TheControl) -> EngineView:
    return await control.engine(name)


@router.delete(
    "/engines/{name}",
    status_code=204,
    response_model=None,
    summary="Remove an engine that the admin API added",
)
async def remove(name: Name, control: TheControl) -> None:
    await control.remove(name)


@router.post("/engines/{name}/drain", summary="Send no new requests to an engine")
async def drain(name: Name, control: TheControl) -> EngineView:
    return await control.drain(name)


@router.post("/engines/{name}/resume", summary="End a drain")
async def resume(name: Name, control: TheControl) -> EngineView:
    return await control.resume(name)


@router.get("/groups", summary="List the compatibility groups and their weights")
async def groups(control: TheControl) -> GroupList:
    return GroupList(groups=await control.groups())


@router.put(
    "/groups/{group}", summary="Set the weight of a group", openapi_extra=_body(GroupWeight)
)
async def weigh(group: GroupName, request: Request, control: TheControl) -> GroupView:
    return await control.weigh(group, (await _read(request, GroupWeight)).weight)


@router.delete(
    "/groups/{group}",
    status_code=204,
    response_model=None,
    summary="Reset a group to its configured weight",
)
async def unweigh(group: GroupName, control: TheControl) -> None:
    await control.unweigh(group)


@router.post("/reload", summary="Reload the settings, and apply those that can change at run time")
async def reload(control: TheControl) -> ReloadResult:
    try:
        return await control.reload()
    except SettingsError as error:
        text = "settings are unchanged: " + "; ".join(error.problems)
        raise OperatorError(400, text) from None


def application(control: Control) -> FastAPI:
    app = FastAPI(
        title="disagg-router admin",
        version=version("disagg-router"),
        openapi_url="/admin/openapi.json",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.control = control
    app.include_router(router)
    app.add_middleware(AdminGate, token=lambda: control.token)
    fastapi_errors.install(app)
    return app


async def _read(request: Request, kind: type[T]) -> T:
    """Return the body's JSON, with a bound on its size and its time. Raises OperatorError."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise OperatorError(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
        return msgspec.json.decode(body, type=kind)
    except TimeoutError:
        raise OperatorError(408, "the body was not received in time") from None
    except ClientDisconnect:
        raise OperatorError(400, "the client has disconnected") from None
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise OperatorError(400, str(error)) from None


class AdminGate:
    """Authentication before an ASGI application.

    `token` returns the admin token in force. Without one the API is for loopback alone, and
    requests of browsers are rejected: any page that a browser on this machine shows could send one.
    """

    def __init__(self, app: ASGIApp, token: Callable[[], str | None]) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = _rejection(scope["headers"], self._token()) if scope["type"] == "http" else None
        app = self._app if error is None else await fastapi_errors.failure(Request(scope), error)
        await app(scope, receive, send)


def _rejection(headers: Headers, token: str | None) -> OperatorError | None:
    if token is None:
        if any(name == b"origin" for name, _ in headers):
            return OperatorError(403, "requests of browsers need an admin token")
    elif not has_bearer_token(headers, token):
        text = "the admin API needs its token: Authorization: Bearer ..."
        return OperatorError(401, text)
    return None
