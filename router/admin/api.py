"""The admin API on a port of its own: engines, groups, reload.

It runs with the control, beside a router or on a thread of its own. `AdminGate` stands before the
endpoints: it checks the admin token.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi import Path as PathPart
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from router.admin.control import Control, EngineList, ReloadResult
from router.admin.processes import ControlChannel, DesiredState, Tunables
from router.auth.api_keys import Headers, has_bearer_token, has_local_host
from router.fleet.engine import EngineRole
from router.fleet.kv_protocol import KvProtocol
from router.fleet.sources.file import EngineFileEntry
from router.fleet.views import EngineView, GroupView
from router.openai import fastapi_errors
from router.openai.errors import OperatorError
from router.settings import GROUP_NAME, MAX_GROUP_WEIGHT, Settings, SettingsError

T = TypeVar("T")
MAX_BODY_BYTES = 64 * 1024
BODY_TIMEOUT_S = 10.0
logger = logging.getLogger("disagg_router.admin")
MAX_ADMIN_CONNECTIONS = 64
# Each connection is for one call, so a connection that lasts longer only keeps others out.
CONNECTION_LIFETIME_S = 30.0
# For calls that run when the router stops.
SHUTDOWN_TIMEOUT_S = 2
THREAD_TIMEOUT_S = 10.0
SOCKET_NAME = "control"


class GroupList(BaseModel):
    groups: list[GroupView]


class GroupWeight(msgspec.Struct, forbid_unknown_fields=True):
    weight: Annotated[float, msgspec.Meta(ge=0, le=MAX_GROUP_WEIGHT)]


def control_of(request: Request) -> Control:
    control: Control = request.app.state.control
    return control


TheControl = Annotated[Control, Depends(control_of)]
Name = Annotated[str, PathPart(description="host:port", max_length=300)]
Migrate = Annotated[bool, Query(description="its streams move to other engines")]
GroupName = Annotated[str, PathPart(pattern=rf"^{GROUP_NAME.pattern}$")]
router = APIRouter(prefix="/admin", tags=["Admin"])


def _body(kind: type) -> dict[str, Any]:
    """Describe a body that FastAPI does not parse."""
    _, components = msgspec.json.schema_components([kind])
    schema: dict[str, Any] = components[kind.__name__]
    properties: dict[str, Any] = schema["properties"]
    for name, values in (("role", EngineRole), ("kv_protocol", KvProtocol)):
        if name in properties:
            properties[name] = {"type": "string", "enum": list(values)}
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
async def drain(name: Name, control: TheControl, migrate: Migrate = False) -> EngineView:
    return await control.drain(name, migrate)


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
    requests of web pages are rejected, which a browser on this machine may show: those with an
    Origin, and those whose Host is not this machine (DNS rebinding).
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
        if not has_local_host(headers):
            text = "without an admin token, Host must be localhost or a loopback address"
            return OperatorError(403, text)
    elif not has_bearer_token(headers, token):
        text = "the admin API needs its token: Authorization: Bearer ..."
        return OperatorError(401, text)
    return None


class EmbeddedServer(uvicorn.Server):
    """uvicorn's server without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serve_control(control: Control, listener: socket.socket | None) -> AsyncIterator[None]:
    """Run the control until the block ends, with its API if there is a socket to listen on."""
    tasks = [asyncio.create_task(control.run())]
    server = None
    if listener is not None:
        config = uvicorn.Config(
            application(control),
            http="h11",  # which bounds the head of a request
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MAX_ADMIN_CONNECTIONS,
            headers=[("connection", "close")],
            timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
        )
        server = EmbeddedServer(config)
        tasks.append(asyncio.create_task(_end_old_connections(server)))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        if server is not None:
            server.should_exit = True
            tasks.append(serving)
        await asyncio.gather(*tasks, return_exceptions=True)


async def _end_old_connections(server: uvicorn.Server) -> None:
    """End connections that last too long, even those that never send a request."""
    since: dict[Any, float] = {}
    clock = asyncio.get_running_loop().time
    while True:
        since = {one: since.get(one, clock()) for one in server.server_state.connections}
        for connection, at in since.items():
            if clock() - at > CONNECTION_LIFETIME_S:
                connection.transport.abort()
        await asyncio.sleep(CONNECTION_LIFETIME_S / 10)


class ControlThread:
    """The control of several worker processes, on a thread of the process that supervises them.

    The workers connect to a socket in `directory`. Raises SettingsError.
    """

    def __init__(
        self,
        settings: Settings,
        read_again: Callable[[], Settings],
        directory: Path,
        listener: socket.socket | None,
    ) -> None:
        self._channel = ControlChannel(DesiredState(Tunables.of(settings)), settings.workers)
        self._control = Control(settings, self._channel.publish, read_again)
        self._path = directory / SOCKET_NAME
        self._listener = listener
        self._is_open = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Run the thread until the block ends."""
        thread = threading.Thread(target=self._run, name="admin", daemon=True)
        thread.start()
        if not self._is_open.wait(THREAD_TIMEOUT_S):
            logger.error("the worker control does not start, so there is no admin API")
        try:
            yield
        finally:
            if self._end is not None:
                self._call_soon(self._end.set)
            thread.join(THREAD_TIMEOUT_S)

    def reload(self) -> None:
        """Reload the settings. Safe in any thread and in a signal handler."""
        self._call_soon(self._control.reload_soon)

    def _call_soon(self, callback: Callable[[], object]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed
                self._loop.call_soon_threadsafe(callback)

    def _run(self) -> None:
        try:
            asyncio.run(self._work())
        except Exception:
            logger.exception("the worker control failed, and the admin API has stopped")

    async def _work(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        async with self._channel.open(self._path), serve_control(self._control, self._listener):
            self._is_open.set()
            await self._end.wait()
