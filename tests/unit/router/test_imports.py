"""The `disagg-router` command does not import packages for features that are off."""

from pathlib import Path

import httpx
import pytest

from scripts.mock_engine import MockEngine
from tests.unit.router.processes import serving_router, started_router

# FastAPI imports OpenTelemetry wherever it is installed.
OPTIONAL = {"dns", "httpx", "httpx2", "jinja2", "lightkube", "redis"}
OF_A_SERVER = {"fastapi", "prometheus_client", "uvicorn", "uvloop"}


@pytest.fixture(autouse=True)
def _reported_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")


def packages_in(lines: list[str]) -> set[str]:
    names = [line.rpartition("|")[2] for line in lines if line.startswith("import time:")]
    return {name.strip().partition(".")[0] for name in names}


async def test_a_router_imports_no_package_of_a_feature_that_is_off(
    p: MockEngine, d: MockEngine, tmp_path: Path
) -> None:
    listed = tmp_path / "engines.yaml"
    listed.write_text(f"[{{url: 'http://127.0.0.1:{d.port}', role: decode}}]")
    async with serving_router(p, d, f"--engines-file={listed}") as router:
        async with httpx.AsyncClient() as client:
            body = {"prompt": "a"}
            assert (await client.post(f"{router.url}/v1/completions", json=body)).is_success
            assert (await client.get(f"{router.url}/openapi.json")).is_success
        router.process.terminate()
        assert await router.ended() == 0
    loaded = packages_in(router.lines)
    assert loaded >= OF_A_SERVER
    assert not OPTIONAL & loaded


async def test_help_imports_no_server() -> None:
    async with started_router("--help") as router:
        assert await router.ended() == 0
    assert not (OPTIONAL | OF_A_SERVER) & packages_in(router.lines)
