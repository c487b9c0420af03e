"""The admin API before a router in this process."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.admin.api import application
from router.admin.control import Control
from router.admin.processes import WorkerProcess
from router.fleet.engine import Health, Intent
from router.settings import Settings
from scripts.mock_engine import DONE, MockEngine
from tests.unit.router.engine_scripts import answer_after, streaming_until, usual_decode
from tests.unit.router.harness import Router, eventually, running_router, settings_for
from tests.unit.router.mock_engine import event

TOKEN = "0123456789abcdef"


@dataclass
class Administered:
    router: Router
    control: Control
    api: httpx.AsyncClient
    given: dict[str, Any]
    """Settings that are there for the next reload."""

    async def engine(self, mock: MockEngine) -> dict[str, Any]:
        answer = await self.api.get(f"/admin/engines/127.0.0.1:{mock.port}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def groups(self) -> dict[str, dict[str, Any]]:
        answer = await self.api.get("/admin/groups")
        return {group.pop("name"): group for group in answer.json()["groups"]}


@contextlib.asynccontextmanager
async def administered(
    p: list[MockEngine], d: list[MockEngine], **changes: Any
) -> AsyncIterator[Administered]:
    given: dict[str, Any] = {"admin_port": 0, "warm_up": "off", **changes}
    settings = settings_for(p=p, d=d, **given)

    def read_again() -> Settings:
        return settings_for(p=p, d=d, **given)

    async with running_router(settings) as router:
        state = router.state
        process = WorkerProcess(
            settings, state.gateway, state.registry, state.signed_store, state.watched_files
        )
        control = Control(settings, process.publish, read_again)
        tidying = asyncio.create_task(control.run())
        app = application(control)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        ) as api:
            await eventually(
                lambda: all(e.health is Health.HEALTHY for e in router.gateway.fleet.engines)
            )
            yield Administered(router, control, api, given)
        tidying.cancel()


def error_of(answer: httpx.Response) -> str:
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == answer.status_code
    return str(error["message"])


async def test_engines_are_told_with_all_that_is_known(p: MockEngine, d: MockEngine) -> None:
    async with administered([p], [d]) as here:
        await here.router.knows_its_engines()
        content = (await here.api.get("/admin/engines")).json()
        assert content["workers"] == {"answered": 1, "known": 1}
        [first, second] = content["engines"]
        assert abs(time.time() - first.pop("since")) < 60
        assert first == {
            "name": f"127.0.0.1:{p.port}",
            "url": f"http://127.0.0.1:{p.port}",
            "role": "prefill",
            "preferred_role": None,
            "role_reason": "",
            "step_limit_ms": None,
            "mixing": None,
            "group": "default",
            "models": ["m", "other"],
            "weight": 1.0,
            "health": "healthy",
            "reason": "",
            "degraded": "",
            "intent": "serving",
            "cold": False,
            "cooling": False,
            "in_flight": 0,
            "tokens_in_flight": 0,
            "holding": 0,
            "circuit": "closed",
            "circuit_reason": "",
            "sources": ["flags"],
            "drained": False,
        }
        assert (second["role"], second["name"]) == ("decode", f"127.0.0.1:{d.port}")


async def test_an_engine_comes_serves_drains_and_goes(
    p: MockEngine, d: MockEngine, d2: MockEngine
) -> None:
    async with administered([p], [d]) as here:
        entry = {"url": f"http://127.0.0.1:{d2.port}", "role": "decode"}
        answer = await here.api.post("/admin/engines", json=entry)
        assert (answer.status_code, answer.json()["sources"]) == (201, ["admin"])
        engine = here.router.engine(d2)
        await eventually(lambda: engine.health is Health.HEALTHY)
        path = f"/admin/engines/127.0.0.1:{d.port}"
        drained = (await here.api.post(f"{path}/drain")).json()
        assert (drained["intent"], drained["drained"]) == ("draining", True)
        for _ in range(4):
            assert (await here.router.complete()).status_code == 200
        assert (len(d.requests), len(d2.requests)) == (0, 4)
        assert error_of(await here.api.delete(path)).endswith("it is listed by flags")
        assert (await here.api.post(f"{path}/resume")).json()["intent"] == "serving"
        added = f"/admin/engines/127.0.0.1:{d2.port}"
        assert (await here.api.delete(added)).status_code == 204
        await eventually(lambda: len(here.router.gateway.fleet.engines) == 2)
        assert (await here.api.get(added)).status_code == 404
        assert (await here.router.complete()).status_code == 200
        assert len(d.requests) == 1


async def test_a_stream_that_runs_on_an_engine_keeps_it(p: MockEngine, d: MockEngine) -> None:
    go_on = asyncio.Event()
    d.scripts = [streaming_until(go_on, event("a"), DONE)]
    async with administered([p], [d]) as here:
        streaming = asyncio.create_task(here.router.stream())
        engine = here.router.engine(d)
        await eventually(lambda: engine.in_flight)
        path = f"/admin/engines/{engine.name}"
        told = (await here.api.post(f"{path}/drain")).json()
        assert (told["in_flight"], told["drained"]) == (1, False)
        assert (await here.router.complete()).status_code == 503, "nothing new goes there"
        go_on.set()
        assert (await streaming).text.endswith("data: [DONE]\n\n")
        assert (await here.engine(d))["drained"]


@pytest.mark.slow
async def test_a_drain_survives_a_new_listing_and_ends_with_the_engine(
    tmp_path: Path, p: MockEngine, d: MockEngine
) -> None:
    file = tmp_path / "engines.yaml"

    def write(*entries: dict[str, Any]) -> None:
        file.with_suffix(".new").write_text(json.dumps({"engines": entries}))
        file.with_suffix(".new").rename(file)

    one = {"url": f"http://127.0.0.1:{d.port}", "role": "decode"}
    write(one)
    async with administered([p], [], engines_file=file) as here:
        engine = here.router.engine(d)
        await here.api.post(f"/admin/engines/{engine.name}/drain")
        write(one | {"weight": 3})
        await eventually(lambda: engine.spec.weight == 3)
        assert engine.intent is Intent.DRAINING
        write()
        await eventually(lambda: not here.control.state.overrides.draining)
        write(one)
        await eventually(lambda: any(e.role == "decode" for e in here.router.gateway.fleet.engines))
        assert here.router.engine(d).intent is Intent.SERVING, "it was gone from all sources"


async def test_groups_are_weighed(p: MockEngine, d: MockEngine) -> None:
    async with administered([p], [d], group_weights="default=4") as here:
        usual = {"prefillers": 1, "decoders": 1, "complete": True}
        assert await here.groups() == {"default": usual | {"weight": 4.0, "weighed_by": "settings"}}
        answer = await here.api.put("/admin/groups/default", json={"weight": 0.5})
        assert answer.json() == usual | {"name": "default", "weight": 0.5, "weighed_by": "admin"}
        assert here.router.gateway.fleet.snapshot.any_model[0].weight == 0.5
        await here.api.put("/admin/groups/green", json={"weight": 0})
        assert (await here.groups())["green"] == {
            "weight": 0.0,
            "weighed_by": "admin",
            "prefillers": 0,
            "decoders": 0,
            "complete": False,
        }
        for group in ("default", "green"):
            assert (await here.api.delete(f"/admin/groups/{group}")).status_code == 204
            assert (await here.api.delete(f"/admin/groups/{group}")).status_code == 404
        assert (await here.groups())["default"]["weight"] == 4.0


async def test_half_a_group_is_seen(p: MockEngine, d: MockEngine, d2: MockEngine) -> None:
    async with administered([p], [d]) as here:
        entry = {"url": f"http://127.0.0.1:{d2.port}", "role": "decode", "group": "green"}
        await here.api.post("/admin/engines", json=entry)
        green = (await here.groups())["green"]
        assert (green["prefillers"], green["decoders"], green["complete"]) == (0, 1, False)
        metric = here.router.metric
        assert metric("group_engines", group="green", role="decode") == 1
        assert metric("group_engines", group="green", role="prefill") == 0
        assert metric("group_engines", group="default", role="prefill") == 1
        assert metric("group_weight", group="green") == 1
        text = (await here.router.client.get("/metrics")).text
        assert 'disagg_router_group_engines{group="green",role="prefill"} 0.0' in text


async def test_what_a_prefiller_holds_is_a_metric(p: MockEngine, d: MockEngine) -> None:
    go_on = asyncio.Event()
    d.scripts = [answer_after(go_on, usual_decode)]
    async with administered([p], [d]) as here:
        asking = asyncio.create_task(here.router.complete())
        await eventually(lambda: d.requests)
        labels = {"engine": f"127.0.0.1:{p.port}", "role": "prefill"}
        assert here.router.metric("engine_holding", **labels) == 1
        told = await here.engine(p)
        assert (told["holding"], told["in_flight"]) == (1, 0)
        go_on.set()
        assert (await asking).status_code == 200
        assert here.router.metric("engine_holding", **labels) == 0


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/admin/engines/x:1", None, 404),
        ("POST", "/admin/engines/x:1/drain", None, 404),
        ("POST", "/admin/engines/x:1/resume", None, 404),
        ("DELETE", "/admin/engines/x:1", None, 404),
        ("DELETE", "/admin/engines", None, 405),
        ("GET", "/", None, 404),
        ("GET", "/docs", None, 404),
        ("GET", "/v1/models", None, 404),
        ("POST", "/admin/engines", "", 400),
        ("POST", "/admin/engines", "{", 400),
        ("POST", "/admin/engines", "[" * 60_000, 400),
        ("POST", "/admin/engines", '{"url": "http://x:1", "role": "decode", "x": 1}', 400),
        ("POST", "/admin/engines", '{"url": "http://x:1"}', 400),
        ("PUT", "/admin/groups/blue", "{}", 400),
        ("PUT", "/admin/groups/blue", '{"weight": -1}', 400),
        ("PUT", "/admin/groups/blue", '{"weight": 1e7}', 400),
        ("PUT", "/admin/groups/blue", '{"weight": NaN}', 400),
        ("PUT", "/admin/groups/blue", '{"weight": true}', 400),
        ("PUT", "/admin/groups/blue", '{"weight": "1"}', 400),
        ("PUT", "/admin/groups/blue", '{"weight": 1, "x": 1}', 400),
        ("PUT", "/admin/groups/a%20b", '{"weight": 1}', 422),
        ("PUT", "/admin/groups/" + "a" * 64, '{"weight": 1}', 422),
        ("GET", "/admin/engines/" + "a" * 301, None, 422),
    ],
)
async def test_what_makes_no_sense_is_an_error_object(
    p: MockEngine, d: MockEngine, method: str, path: str, body: str | None, status: int
) -> None:
    async with administered([p], [d]) as here:
        before = here.control.state
        answer = await here.api.request(method, path, content=body)
        assert answer.status_code == status, answer.text
        assert error_of(answer)
        assert here.control.state == before


async def test_the_api_describes_itself(p: MockEngine, d: MockEngine) -> None:
    async with administered([p], [d]) as here:
        document = (await here.api.get("/admin/openapi.json")).json()
        assert {path: set(ways) for path, ways in document["paths"].items()} == {
            "/admin/engines": {"get", "post"},
            "/admin/engines/{name}": {"get", "delete"},
            "/admin/engines/{name}/drain": {"post"},
            "/admin/engines/{name}/resume": {"post"},
            "/admin/groups": {"get"},
            "/admin/groups/{group}": {"put", "delete"},
            "/admin/reload": {"post"},
        }
        add = document["paths"]["/admin/engines"]["post"]["requestBody"]["content"]
        schema = add["application/json"]["schema"]
        assert schema["required"] == ["url", "role"]
        assert schema["additionalProperties"] is False
        assert "$ref" not in json.dumps(schema)


async def test_callers_need_the_token_as_it_is_now(
    tmp_path: Path, p: MockEngine, d: MockEngine
) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    async with administered([p], [d], admin_token_file=file) as here:
        for path in ("/admin/engines", "/admin/openapi.json", "/nowhere"):
            answer = await here.api.get(path)
            assert answer.status_code == 401
            error_of(answer)
        here.api.headers["authorization"] = f"Bearer {TOKEN}"
        file.write_text("another one, later".replace(" ", "-"))
        answer = await here.api.post("/admin/reload")
        assert answer.json() == {"applied": ["admin_token"], "needs_restart": []}
        assert (await here.api.get("/admin/engines")).status_code == 401
        here.api.headers["authorization"] = "Bearer another-one,-later"
        assert (await here.api.get("/admin/engines")).status_code == 200


async def test_limits_change_while_requests_run(p: MockEngine, d: MockEngine) -> None:
    """Without any limit at the start, so that nobody queues; then with one; then without again."""
    go_on = asyncio.Event()
    d.usual = answer_after(go_on, usual_decode)
    async with administered([p], [d]) as here:
        here.given |= {"max_engine_requests": 1, "queue_size": 1, "queue_timeout": 60.0}
        here.given |= {"max_body_size": 2048, "max_held_bodies": 4096, "max_connections": 7}
        here.given["changing_prompt_lines"] = ["Today is *"]
        asking = [asyncio.create_task(here.router.complete())]
        await eventually(lambda: len(d.requests) == 1)
        answer = await here.api.post("/admin/reload")
        assert set(answer.json()["applied"]) == {
            "max_engine_requests",
            "queue_size",
            "queue_timeout",
            "max_body_size",
            "max_held_bodies",
            "max_connections",
            "changing_prompt_lines",
        }
        gateway = here.router.gateway
        assert (gateway.limits.max_connections, gateway.memory.bodies.limit) == (7, 4096)
        assert gateway.limits.changing_prompt_lines == ("Today is *",)
        asking += [asyncio.create_task(here.router.complete()) for _ in range(2)]
        await eventually(lambda: gateway.admission is not None and gateway.admission.depth == 1)
        assert here.router.metric("queue_depth") == 1
        crowded = await here.router.complete()
        assert crowded.status_code in (429, 503)
        async with httpx.AsyncClient(base_url=here.router.url) as other:
            large = await other.post("/v1/completions", json={"prompt": "x" * 4000, "model": "m"})
        assert large.status_code == 413
        here.given["max_engine_requests"] = 0
        await here.api.post("/admin/reload")
        await eventually(lambda: len(d.requests) == 3)
        go_on.set()
        assert [(await one).status_code for one in asking] == [200, 200, 200]


async def test_a_broken_reload_is_answered_with_its_reasons(p: MockEngine, d: MockEngine) -> None:
    async with administered([p], [d]) as here:
        here.given |= {"queue_size": 3, "config": "/nowhere.yaml"}
        before = here.control.state
        answer = await here.api.post("/admin/reload")
        assert answer.status_code == 400
        assert "--config /nowhere.yaml: No such file" in error_of(answer)
        assert here.control.state == before
