"""/ready: whether a request would be answered; and what is said of what is missing."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from router.commands.status import main as status_main
from router.fleet.engine import DECODE, PREFILL, EngineRole, Health
from router.fleet.fleet import Fleet
from router.fleet.readiness import Readiness, assess_readiness, describe_lack
from router.fleet.views import build_fleet_view
from router.settings import Settings
from scripts.mock_engine import MockEngine
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import usual_decode
from tests.unit.router.fleet.test_consistency import fleet_of
from tests.unit.router.fleet.test_partners import NO_CONNECTOR_PAGE, page
from tests.unit.router.harness import Router, eventually, running_router

PAIR = ((PREFILL, "default"), (DECODE, "default"))


def assess(fleet: Fleet, decodes_alone: bool = True) -> Readiness:
    return assess_readiness(fleet, decodes_alone, 16384)


async def test_router_is_not_ready_before_the_first_probes_of_prefill_engines() -> None:
    fleet = fleet_of(*PAIR)
    assert set(assess(fleet).blocking) == {"prefill", "decode"}
    prefiller, decoder = fleet.engines
    fleet.note_probe_passed(decoder)
    assert set(assess(fleet).blocking) == {"prefill"}
    fleet.note_unreachable(prefiller, "refused")
    found = assess(fleet)
    assert not found.blocking
    assert found.degrading == {
        "prefill": "h:1: refused; decode engines answer alone, prompts of up to 16384 tokens"
    }


async def test_new_prefill_engine_that_is_not_probed_does_not_make_the_router_unready() -> None:
    fleet = fleet_of(*PAIR)
    prefiller, decoder = fleet.engines
    fleet.note_probe_passed(decoder)
    fleet.note_probe_passed(prefiller)
    fleet.remove(prefiller.name)
    fleet.add(prefiller.spec)
    assert fleet.engines[1].health is Health.UNKNOWN
    assert not assess(fleet).blocking


async def test_pairs_of_other_models_answer_only_if_decode_engines_may_answer_alone() -> None:
    fleet = fleet_of(*PAIR)
    for engine, model in zip(fleet.engines, "mn", strict=True):
        fleet.note_models(engine, frozenset(model), {})
        fleet.note_probe_passed(engine)
    fleet.set_group_weights({})
    reason = "engines differ: models m and n"
    assert assess(fleet).degrading == {"h:1": reason, "h:2": reason}
    assert assess(fleet, decodes_alone=False).blocking["h:2"] == reason


@pytest.mark.parametrize(
    ("role", "model", "text"),
    [
        (DECODE, "m", "no decode engine serves the model `m`: h:2 serves n"),
        (PREFILL, "n", "no prefill engine serves the model `n`: h:1 serves m"),
        (
            PREFILL,
            "m",
            "no prefill engine can exchange KV for the model `m`: h:1: engines differ: "
            "models m and n",
        ),
        (PREFILL, None, "no prefill engine can exchange KV: h:1: engines differ: models m and n"),
    ],
)
async def test_what_is_there_instead_is_named(role: EngineRole, model: object, text: str) -> None:
    fleet = fleet_of(*PAIR)
    for engine, served in zip(fleet.engines, "mn", strict=True):
        fleet.note_models(engine, frozenset(served), {})
        fleet.note_probe_passed(engine)
    fleet.set_group_weights({})
    assert describe_lack(fleet, model, role, names_models=True) == text
    assert "serves n" not in describe_lack(fleet, model, role, names_models=False)


async def test_text_about_many_engines_is_short() -> None:
    fleet = fleet_of(*[(DECODE, "default")] * 50)
    text = describe_lack(fleet, "x" * 9999, DECODE, names_models=True)
    assert text.endswith("h:3 is not probed yet and 47 more")
    assert len(text) < 300
    assert describe_lack(fleet_of(), 7, DECODE, names_models=True) == "no decode engine is known"


async def ready(router: Router) -> tuple[int, Any]:
    answer = await router.client.get("/ready")
    return answer.status_code, answer.json()


async def test_router_without_prefill_engines_is_ready_and_answers(
    start_router: StartRouter, p: MockEngine
) -> None:
    router = await start_router(without_prefiller="decode")
    await p.stop()
    await eventually(lambda: router.gateway.fleet.unavailable_roles())
    status, body = await ready(router)
    assert (status, body["status"]) == (200, "degraded")
    assert "decode engines answer alone" in body["reasons"]["prefill"]
    assert (await router.complete()).status_code == 200


async def test_router_without_decode_engines_is_not_ready(
    start_router: StartRouter, d: MockEngine
) -> None:
    router = await start_router(without_prefiller="decode")
    await d.stop()
    await eventually(lambda: router.gateway.fleet.unavailable_roles())
    status, body = await ready(router)
    assert (status, list(body["reasons"])) == (503, ["decode"])
    assert (await router.complete()).status_code == 503


async def test_decode_engine_without_connector_degrades_and_gets_no_prefilled_prompt(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    p.identity, d.identity = page(), NO_CONNECTOR_PAGE
    router = await start_router(without_prefiller="decode")
    status, body = await ready(router)
    name = f"127.0.0.1:{d.port}"
    assert (status, body["status"]) == (200, "degraded")
    assert body["reasons"][name] == "started without --kv-transfer-config"
    (finding,) = body["findings"]
    assert finding["text"] == (
        f"decode engine {name} was started without --kv-transfer-config, so no KV moves"
    )
    assert (await router.complete()).status_code == 200
    assert not p.requests, "the prompt is not computed twice"


async def test_decode_engine_with_connector_is_preferred_to_one_without(
    start_router: StartRouter, p: MockEngine, d: MockEngine, d2: MockEngine, p2: MockEngine
) -> None:
    p.identity = d.identity = page()
    p2.identity = d2.identity = NO_CONNECTOR_PAGE
    router = await start_router(ps=[p, p2], ds=[d, d2], without_prefiller="decode")
    await eventually(lambda: all(e.health == "healthy" for e in router.gateway.fleet.engines))
    for _ in range(4):
        assert (await router.complete()).status_code == 200
    assert (len(d.requests), len(d2.requests), len(p2.requests)) == (4, 0, 0)


@pytest.mark.parametrize("lacking", ["prefill", "decode"])
async def test_named_group_computes_no_prompt_twice_without_a_connector(
    tmp_path: Path, p: MockEngine, d: MockEngine, lacking: str
) -> None:
    p.identity = NO_CONNECTOR_PAGE if lacking == "prefill" else page()
    d.identity = NO_CONNECTOR_PAGE if lacking == "decode" else page()
    lines = [
        f"  - {{url: 'http://127.0.0.1:{engine.port}', role: {role}, group: blue}}"
        for role, engine in (("prefill", p), ("decode", d))
    ]
    path = tmp_path / "engines.yaml"
    path.write_text("\n".join(["engines:", *lines]))
    settings = Settings(engines_file=path, health_interval=0.05)
    async with running_router(settings) as router:
        await eventually(lambda: not router.gateway.fleet.unavailable_roles())
        for _ in range(2):
            assert (await router.complete()).status_code == 200
        assert (len(p.requests), len(d.requests)) == (0, 2)
        name = f"127.0.0.1:{(p if lacking == 'prefill' else d).port}"
        reasons = (await ready(router))[1]["reasons"]
        assert reasons[name] == "started without --kv-transfer-config"


async def test_engine_that_gets_a_connector_becomes_a_partner(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    p.identity, d.identity = page(), NO_CONNECTOR_PAGE
    router = await start_router(without_prefiller="decode")
    assert (await ready(router))[1]["status"] == "degraded"
    d.identity = page()
    await router.state.prober.fetch_identity(router.engine(d))
    await eventually(lambda: router.engine(d).group == router.engine(p).group)
    assert await ready(router) == (200, {"status": "ready"})


async def test_request_for_a_model_of_prefill_engines_alone_names_what_there_is(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    p.models, d.models = ["m"], ["n"]
    router = await start_router()
    await router.knows_its_engines()
    answer = await router.complete(model="m")
    text = f"no decode engine serves the model `m`: 127.0.0.1:{d.port} serves n"
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, text)
    answer = await router.complete(model="n")
    text = f"no prefill engine serves the model `n`: 127.0.0.1:{p.port} serves m"
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, text)


async def test_degraded_engine_is_shown_by_status_metrics_and_dashboard(
    start_router: StartRouter, p: MockEngine, d: MockEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    p.identity, d.identity = page(), page({"num_layers": "36"})
    router = await start_router(without_prefiller="decode", ui=True)
    name, reason = f"127.0.0.1:{d.port}", "engines differ: num_layers 28 and 36"
    labels = {"role": "decode", "engine": name, "reason": reason}
    await eventually(lambda: router.metric("engine_degraded", **labels))
    assert await asyncio.to_thread(status_main, [router.url]) == 0
    output = capsys.readouterr().out
    assert f"decode engine {name} moves no KV: {reason}" in output
    assert re.search(rf"decode +{name} +degraded", output)
    view = build_fleet_view(router.gateway.fleet, router.state.registry)
    assert {one.degraded for one in view.engines} == {reason}


async def test_request_that_ran_alone_names_the_reason(
    start_router: StartRouter, p: MockEngine, d: MockEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="disagg_router.access")
    p.identity, d.identity = page(), page({"num_layers": "36"})
    router = await start_router(without_prefiller="decode")
    assert (await router.complete()).status_code == 200
    p.identity = d.identity = page()
    for engine in (p, d):
        await router.state.prober.fetch_identity(router.engine(engine))
    await eventually(lambda: router.engine(d).group == router.engine(p).group)
    assert (await router.complete()).status_code == 200
    p.scripts.append(usual_decode)  # an answer without kv_transfer_params
    assert (await router.complete()).status_code == 200
    router.gateway.records.flush()
    lines = [line for one in caplog.records for line in getattr(one, "lines", [])]
    alone, moved, offered_none = (line.content() for line in lines)
    assert alone["without_transfer"] == "engines differ: num_layers 28 and 36"
    assert "alone (engines differ: num_layers 28 and 36)" in lines[0].short()
    assert "without_transfer" not in moved
    assert offered_none["without_transfer"] == f"127.0.0.1:{p.port} offered no KV"


async def test_redis_that_is_down_degrades_the_router(start_router: StartRouter) -> None:
    router = await start_router(conversation_store="redis://127.0.0.1:1")
    await eventually(router.state.failures)
    status, body = await ready(router)
    assert (status, body["status"]) == (200, "degraded")
    assert "each goes by its own requests" in body["reasons"]["routers"]
