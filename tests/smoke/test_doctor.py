"""disagg-router doctor on real engines: a fleet that is well, and one whose decode engine has no KV
connector."""

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.conftest import find_free_ports
from tests.integration.oracle import complete
from tests.integration.processes import Launcher, Server, serving, wait_for
from tests.smoke.conftest import SmokeFleet


@pytest.fixture(scope="module")
def lone(launcher: Launcher) -> Iterator[Server]:
    """A decode engine that was started without --kv-transfer-config."""
    (port,) = find_free_ports(1)
    command = ["engine_ext.reference.cli", "--model", str(launcher.model), "--port", str(port)]
    command += ["--served-model-name", "tiny", "--num-threads", "1"]
    with serving(
        "lone", command, port, launcher.directory, "/health", fork_server=launcher.fork_server
    ) as server:
        yield server


def doctor(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    command = [sys.executable, "-m", "router.commands.cli", "doctor", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, timeout=120)
    assert done.stdout, done.stderr.decode()
    checks = json.loads(done.stdout)["checks"]
    assert (done.returncode == 0) == (not failed(checks))
    return done.returncode, checks


def failed(checks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [check for check in checks if check["state"] == "FAIL"]


def engines(p: Server, d: Server) -> tuple[str, ...]:
    return "--prefill", f"127.0.0.1:{p.port}", "--decode", f"127.0.0.1:{d.port}"


def texts(checks: list[dict[str, Any]], name: str) -> list[str]:
    return [check["text"] for check in checks if check["name"] == name]


def test_fleet_that_is_well_has_no_failed_check_and_moves_kv(
    launcher: Launcher, fleet: SmokeFleet
) -> None:
    for p, d in ((fleet.p, fleet.d), (fleet.push_p, fleet.push_d)):
        _, checks = doctor(*engines(p, d))
        assert failed(checks) == []
        (moved,) = texts(checks, "KV moved")
        assert moved.startswith("yes, ")
        back = texts(checks, "KV moved back")
        assert [text[:5] for text in back] == (["yes, "] if p is fleet.p else [])
        (content,) = texts(checks, "KV content")
        assert content == "both engines have the same first token, 1 of 1 pairs compared"
        (rate,) = texts(checks, "KV rate")
        assert " or more, 1 of 1 pairs measured with prompts of 4096 tokens" in rate
        (borrowed,) = texts(checks, "prefix borrowed")
        assert borrowed.startswith("yes, " if p is fleet.p else "no engine lends")
    with launcher.router([fleet.p], [fleet.d]) as router:
        _, checks = doctor(router.url)
        assert failed(checks) == []
        assert len(texts(checks, "KV moved")) == 2, "directly, and through the router"


def test_decode_engine_without_connector_is_named_by_doctor_router_and_log(
    launcher: Launcher, fleet: SmokeFleet, lone: Server
) -> None:
    with ThreadPoolExecutor(1) as pool, launcher.router([fleet.p], [lone]) as router:
        # It repeats what fails, and waits before it does.
        examined = pool.submit(doctor, *engines(fleet.p, lone))
        ready = router.get("/ready").json()
        name = f"127.0.0.1:{lone.port}"
        assert ready["status"] == "degraded"
        assert ready["reasons"][name] == "started without --kv-transfer-config"
        assert complete(router, "hello").tokens
        line = f"decode engine {name} was started without --kv-transfer-config"
        wait_for(lambda: line in router.log.read_text(), "the log names the engine")
        code, checks = examined.result()
    assert code == 1
    assert texts(checks, "identity")[-1].startswith("started without --kv-transfer-config")


def test_router_that_loses_its_prefill_engine_stays_ready_and_answers(
    launcher: Launcher,
) -> None:
    # Not the decode engine of all tests, which computes no prompt.
    with (
        launcher.engine("killed") as killed,
        launcher.engine("left") as left,
        launcher.router([killed], [left]) as router,
    ):
        killed.kill()
        wait_for(lambda: "prefill" in router.get("/ready").json().get("reasons", {}), "it is lost")
        ready = router.get("/ready")
        assert (ready.status_code, ready.json()["status"]) == (200, "degraded")
        assert complete(router, "hello").tokens
