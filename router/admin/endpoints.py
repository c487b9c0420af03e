"""The admin API: engines, groups, reload. A FastAPI application of its own, for its own port."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Path, Request
from fastapi.responses import Response
from pydantic import BaseModel

from router.admin.access import AdminGate
from router.admin.control import AdminRequestError, Control
from router.fleet.engine_spec import EngineRole
from router.fleet.sources.file import EngineFileEntry
from router.fleet.views import EngineView, GroupView
from router.openai import fastapi_errors
from router.openai.errors import error_body, type_of_status
from router.settings import GROUP_NAME, MAX_GROUP_WEIGHT, SettingsError

T = TypeVar("T")
TYPES = {409: "ConflictError"}


class WorkerCounts(BaseModel):
    answered: int
    known: int


class EngineList(BaseModel):
    """Nobody is `drained` while a worker does not answer."""

    engines: list[EngineView]
    workers: WorkerCounts


class GroupList(BaseModel):
    groups: list[GroupView]


class ReloadResult(BaseModel):
    """Names of settings: those that are new now, and those that differ and need a restart."""

    applied: list[str]
    needs_restart: list[str]


class NewWeight(msgspec.Struct, forbid_unknown_fields=True):
    weight: Annotated[float, msgspec.Meta(ge=0, le=MAX_GROUP_WEIGHT)]


def control_of(request: Request) -> Control:
    control: Control = request.app.state.control
    return control


TheControl = Annotated[Control, Depends(control_of)]
Name = Annotated[str, Path(description="host:port", max_length=300)]
GroupName = Annotated[str, Path(pattern=rf"^{GROUP_NAME.pattern}$")]
router = APIRouter(prefix="/admin", tags=["Admin"])


def _schema(kind: type) -> dict[str, Any]:
    _, components = msgspec.json.schema_components([kind])
    schema: dict[str, Any] = components[kind.__name__]
    properties: dict[str, Any] = schema["properties"]
    if "role" in properties:
        properties["role"] = {"type": "string", "enum": list(EngineRole)}
    if "group" in properties:
        properties["group"]["pattern"] = f"^{GROUP_NAME.pattern}$"
    return schema


def _body(kind: type) -> dict[str, Any]:
    content = {"application/json": {"schema": _schema(kind)}}
    return {"requestBody": {"required": True, "content": content}}


@router.get("/engines", summary="Every engine, as all processes of the router see it")
async def engines(control: TheControl) -> EngineList:
    seen = await control.engines()
    workers = WorkerCounts(answered=seen.answered, known=seen.known)
    return EngineList(engines=seen.engines, workers=workers)


@router.post(
    "/engines", status_code=201, summary="Adds an engine", openapi_extra=_body(EngineFileEntry)
)
async def add(request: Request, control: TheControl) -> EngineView:
    return await control.add(_read(await request.body(), Any))


@router.get("/engines/{name}", summary="One engine")
async def engine(name: Name, control: TheControl) -> EngineView:
    return await control.engine(name)


@router.delete(
    "/engines/{name}",
    status_code=204,
    response_model=None,
    summary="Takes away what was added here",
)
async def remove(name: Name, control: TheControl) -> None:
    await control.remove(name)


@router.post("/engines/{name}/drain", summary="It gets nothing new, whatever sources say")
async def drain(name: Name, control: TheControl) -> EngineView:
    return await control.drain(name)


@router.post("/engines/{name}/resume", summary="Takes that back")
async def resume(name: Name, control: TheControl) -> EngineView:
    return await control.resume(name)


@router.get("/groups", summary="Groups of engines that pair, and their weights")
async def groups(control: TheControl) -> GroupList:
    return GroupList(groups=await control.groups())


@router.put("/groups/{group}", summary="Gives a group a weight", openapi_extra=_body(NewWeight))
async def weigh(group: GroupName, request: Request, control: TheControl) -> GroupView:
    weight = _read(await request.body(), NewWeight).weight
    return await control.weigh(group, weight)


@router.delete("/groups/{group}", status_code=204, response_model=None, summary="Takes that back")
async def unweigh(group: GroupName, control: TheControl) -> None:
    await control.unweigh(group)


@router.post("/reload", summary="Reads settings again, and applies those that may change now")
async def reload(control: TheControl) -> ReloadResult:
    reloaded = await control.reload()
    return ReloadResult(applied=reloaded.applied, needs_restart=reloaded.needs_restart)


def application(control: Control) -> AdminGate:
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
    fastapi_errors.install(app)
    app.add_exception_handler(AdminRequestError, _refused)
    app.add_exception_handler(SettingsError, _unusable)
    return AdminGate(app, lambda: control.token)


def _read(body: bytes, kind: type[T]) -> T:
    """Raises AdminRequestError."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise AdminRequestError(400, str(error)) from None


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, AdminRequestError)
    return _answer(error.status, str(error))


async def _unusable(_: Request, error: Exception) -> Response:
    assert isinstance(error, SettingsError)
    return _answer(400, "settings stay as they are: " + "; ".join(error.problems))


def _answer(status: int, text: str) -> Response:
    kind = TYPES.get(status) or type_of_status(status)
    return Response(error_body(status, kind, text), status, None, "application/json")
