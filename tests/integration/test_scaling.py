"""Engines come and go under load, and no client notices: real engines, of which the router is told
in a file or by hand.

The same in Kubernetes, with pods that a real API server tells of, is in tests/k8s/test_scaling.py.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.conftest import find_free_ports
from tests.integration import load, nursery
from tests.integration.accounts import lost_by_decode, lost_by_prefill
from tests.integration.load import Load, Script
from tests.integration.models import another_version
from tests.integration.processes import BOTH_WAYS, Server, serving, wait_for
from tests.integration.tellers import TELLERS, Teller

ROLES = {"p": "prefill", "d": "decode"}
# Requests of the router's own to an engine that comes: one for each of the other role.
WARM_UPS = 2


@dataclass
class Fleet:
    """Engines by their names, whose first letter is their role. Two versions of the model say the
    same, and take each other for strangers: KV that went from one to the other would be refused and
    computed anew, which is found in the decode engine's counts."""

    folder: Path
    models: dict[str, Path]
    teller: Teller
    urls: dict[str, str] = field(default_factory=dict)
    engines: dict[str, nursery.Engine] = field(default_factory=dict)

    def start(self, group: str, *names: str, weight: float = 1) -> None:
        """The router knows of them when they answer."""
        for name in names:
            port, side_channel = find_free_ports(2)
            variables = {
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel),
            }
            arguments = [f"--model={self.models[group]}", f"--port={port}", "--num-threads=1"]
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
            self.teller.add([self.urls[name]], ROLES[name[0]], group, weight)

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


@pytest.fixture(scope="module")
def asked(alone: Server) -> list[Script]:
    return load.scripts(alone, 4)


@pytest.fixture(params=TELLERS)
def fleet(request: pytest.FixtureRequest, tmp_path: Path, model: Path) -> Iterator[Fleet]:
    models = {"blue": model, "green": another_version(model, tmp_path / "v2")}
    fleet = Fleet(tmp_path, models, TELLERS[request.param](tmp_path / "engines.yaml"))
    yield fleet
    for engine in fleet.engines.values():
        engine.close()


@contextmanager
def router_of(fleet: Fleet) -> Iterator[Server]:
    [port] = find_free_ports(1)
    command = ["router.commands.cli", "--port", str(port), *fleet.teller.flags]
    command += ["--health-timeout", "5"]  # two cores run all of it
    with serving("router", command, port, fleet.folder, "/health") as router:
        yield router


def is_ready(router: Server) -> bool:
    return router.get("/ready").status_code == 200


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


def is_read(router: Server, url: str) -> bool:
    """Nobody needs this prefiller any more."""
    return in_flight(router, url) <= 0 and of_engine(router, "holding", url) <= 0


def leave(
    fleet: Fleet, router: Server, prefiller: str, decoder: str, group: str = ""
) -> dict[str, nursery.Counts]:
    """Amid answers; what they had counted. The prefiller goes first: where a group's last decoder
    leaves with it, what was prefilled at that moment has no reader left. `group`: gets no weight,
    as soon as they are in the midst of it; from then on less and less comes to them."""
    urls = fleet.urls[prefiller], fleet.urls[decoder]
    wait_for(lambda: in_flight(router, urls[1]) > 1, f"{decoder} is in the midst of it", 60)
    if group:
        fleet.teller.weigh(group, 0)
    fleet.teller.remove([urls[0]])
    wait_for(lambda: has_been_told(router, urls[0]), "the router has read it")
    wait_for(lambda: is_read(router, urls[0]), "its KV has been read", 30)
    fleet.teller.remove([urls[1]])
    wait_for(lambda: has_been_told(router, urls[1]), "the router has read it")
    return fleet.end(prefiller, decoder)


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_a_fleet_is_scaled_and_rolled_out_and_no_client_notices(
    fleet: Fleet, asked: list[Script]
) -> None:
    with router_of(fleet) as router:
        fleet.start("blue", "p1", "d1")
        wait_for(lambda: is_ready(router), "the router is ready", 60, 0.1)
        with Load(router.url, asked, 4) as clients:
            clients.goes_on(5)
            fleet.start("blue", "p2", "d2")
            fleet.start("green", "p3", "d3", weight=0)
            wait_for(lambda: fleet.has_worked("p2", "d2"), "the new ones work", 60, 0.1)
            counts = leave(fleet, router, "p1", "d1")
            assert not fleet.has_worked("p3", "d3"), "it has no weight"
            fleet.teller.weigh("green", 1)
            wait_for(lambda: fleet.has_worked("p3", "d3"), "green works", 60, 0.1)
            counts |= leave(fleet, router, "p2", "d2", "blue")
            clients.goes_on(5)
        counts |= fleet.end("p3", "d3")
    assert not clients.troubles
    for name, counted in counts.items():
        lost = lost_by_prefill(counted) if name[0] == "p" else lost_by_decode(counted)
        assert not lost, f"{name}: {lost}"
        assert counted["generation_tokens"] > WARM_UPS
