"""Engines come and go under load, and no client notices: real engines, and a file that lists them.

The same in Kubernetes, with pods that a real API server tells of, is in tests/k8s/test_scaling.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import yaml

from tests.conftest import find_free_ports
from tests.integration import load, nursery
from tests.integration.accounts import lost_by_decode, lost_by_prefill
from tests.integration.load import Load
from tests.integration.processes import BOTH_WAYS, Server, serving, wait_for

# Requests of the router's own to an engine that comes: one for each of the other role.
WARM_UPS = 2


@dataclass
class Fleet:
    """Engines by their names, whose first letter is their role; `file` lists some of them."""

    folder: Path
    model: Path
    file: Path
    urls: dict[str, str] = field(default_factory=dict)
    engines: dict[str, nursery.Engine] = field(default_factory=dict)

    def start(self, *names: str) -> None:
        for name in names:
            port, side_channel = find_free_ports(2)
            variables = {
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel),
            }
            arguments = [f"--model={self.model}", f"--port={port}", "--num-threads=1"]
            arguments += ["--served-model-name=tiny", "--no-enable-prefix-caching"]
            transfer = {
                "kv_connector": "DisaggConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": BOTH_WAYS,
            }
            arguments += ["--shutdown-timeout=40", "--kv-transfer-config", json.dumps(transfer)]
            self.urls[name] = f"http://127.0.0.1:{port}"
            self.engines[name] = nursery.Engine(name, arguments, variables, self.folder)
        for name in names:
            wait_for(lambda name=name: self._answers(name), f"{name} answers", 60)  # type: ignore[misc]

    def list(self, *names: str) -> None:
        roles = {"p": "prefill", "d": "decode"}
        engines = [{"url": self.urls[name], "role": roles[name[0]]} for name in names]
        fresh = self.file.with_suffix(".new")
        fresh.write_text(yaml.safe_dump({"engines": engines}))
        fresh.replace(self.file)

    def end(self, *names: str) -> dict[str, nursery.Counts]:
        """What each had counted when it had ended by itself."""
        for name in names:
            self.engines[name].terminate()
        for name in names:
            engine = self.engines[name]
            wait_for(lambda engine=engine: engine.exit_status() is not None, f"{name} ends", 60)  # type: ignore[misc]
            assert engine.exit_status() == 0, engine.log.read_text()[-4000:]
        return {name: self.engines[name].last_words() for name in names}

    def has_worked(self, *names: str) -> bool:
        """For clients: more requests than their pairs took to warm."""
        return all(self._finished(name) > WARM_UPS for name in names)

    def _finished(self, name: str) -> float:
        lines = httpx.get(f"{self.urls[name]}/metrics", trust_env=False).text.splitlines()
        found = [line for line in lines if line.startswith("disagg_engine_requests_finished_total")]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    def _answers(self, name: str) -> bool:
        engine = self.engines[name]
        assert engine.exit_status() is None, engine.log.read_text()[-4000:]
        try:
            return httpx.get(f"{self.urls[name]}/health", trust_env=False).status_code == 200
        except httpx.TransportError:
            return False


@pytest.fixture
def fleet(tmp_path: Path, model: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path, model, tmp_path / "engines.yaml")
    yield fleet
    for engine in fleet.engines.values():
        engine.close()


@contextmanager
def router_of(fleet: Fleet) -> Iterator[Server]:
    [port] = find_free_ports(1)
    command = ["router.cli", "--port", str(port), "--engines-file", str(fleet.file)]
    command += ["--health-timeout", "5"]  # two cores run all of it
    with serving("router", command, port, fleet.folder, "/ready") as router:
        yield router


def in_flight(router: Server, url: str) -> float:
    return of_engine(router, "requests_in_flight", url)


def has_been_told(router: Server, url: str) -> bool:
    """That an engine leaves: it drains, or is gone already."""
    return of_engine(router, "draining", url) != 0


def of_engine(router: Server, what: str, url: str) -> float:
    """-1 for one that it does not know."""
    samples, name = router.metrics().items(), f'engine="{url.removeprefix("http://")}"'
    found = {one: n for one, n in samples if one.startswith(f"disagg_router_engine_{what}{{")}
    assert found, f"there is no metric for {what}"
    return next((n for one, n in found.items() if name in one), -1)


def test_a_fleet_grows_and_shrinks_and_no_client_notices(fleet: Fleet, alone: Server) -> None:
    asked = load.scripts(alone, 4)
    fleet.start("p1", "d1")
    fleet.list("p1", "d1")
    with router_of(fleet) as router, Load(router.url, asked, 4) as clients:
        clients.goes_on(5)
        fleet.start("p2", "d2")
        fleet.list("p1", "d1", "p2", "d2")
        wait_for(lambda: fleet.has_worked("p2", "d2"), "the new ones work", 60, 0.1)
        wait_for(lambda: in_flight(router, fleet.urls["d1"]) > 1, "d1 is in the midst of it", 60)
        fleet.list("p2", "d2")
        wait_for(lambda: has_been_told(router, fleet.urls["d1"]), "the router has read it")
        counts = fleet.end("p1", "d1")
        clients.goes_on(10)
    counts |= fleet.end("p2", "d2")
    assert not clients.troubles
    assert not {name: lost for name in ("p1", "p2") if (lost := lost_by_prefill(counts[name]))}
    assert not {name: lost for name in ("d1", "d2") if (lost := lost_by_decode(counts[name]))}
    assert min(one["generation_tokens"] for one in counts.values()) > WARM_UPS
