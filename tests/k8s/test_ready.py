"""The chart's readiness probe and a fleet that loses its prefill engines: the router stays in the
Service, because decode engines answer alone."""

from pathlib import Path

import pytest

from router.settings import Settings, load
from tests.k8s.chart import SETS, only, pods, rendered
from tests.unit.router.engine_scripts import usual_decode, usual_prefill
from tests.unit.router.harness import eventually, running_router
from tests.unit.router.mock_engine import running_engine


def chart_settings(name: str, directory: Path, **changes: object) -> Settings:
    """The settings that the chart gives a router, with engines of this test instead of pods."""
    file = directory / "config.yaml"
    file.write_text(only(rendered(name), "ConfigMap")["data"]["config.yaml"])
    settings = load({"config": file})
    # The stores, keys and certificates of an example are not what this is about.
    given = {field: getattr(settings, field) for field in ("without_prefiller", "warm_up")}
    given["without_prefiller_tokens"] = settings.without_prefiller_tokens
    return load({**given, **changes, "health_interval": 0.05, "health_timeout": 10})


@pytest.mark.parametrize("name", SETS)
async def test_router_without_prefill_engines_stays_in_the_service(
    name: str, tmp_path: Path
) -> None:
    [container] = dict(pods(rendered(name)))["r-disagg-router"]["containers"]
    probe = container["readinessProbe"]
    async with running_engine(usual_prefill) as p, running_engine(usual_decode) as d:
        engines = {"prefill": (f"127.0.0.1:{p.port}",), "decode": (f"127.0.0.1:{d.port}",)}
        async with running_router(chart_settings(name, tmp_path, **engines)) as router:

            async def status() -> int:
                return (await router.client.get(probe["httpGet"]["path"])).status_code

            await eventually(lambda: not router.gateway.fleet.unavailable_roles())
            assert await status() == 200
            await p.stop()
            await eventually(lambda: router.gateway.fleet.unavailable_roles())
            assert [await status() for _ in range(probe["failureThreshold"])] == [200] * 2
            answer = await router.complete()
            assert answer.status_code == 200, "it is right to send it requests"
            await d.stop()
            await eventually(lambda: len(router.gateway.fleet.unavailable_roles()) == 2)
            assert await status() == 503
            assert (await router.complete()).status_code == 503
