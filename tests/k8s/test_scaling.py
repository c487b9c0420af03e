"""The chart in a cluster, scaled and rolled out under load, with all that happens meanwhile: no
client notices, no token is wrong, no KV is lost.

What is real: Helm and the chart, with its RBAC; the API server and its controllers; the router and
the engines, with the commands of their pods; Traefik as the Gateway of the chart's HTTPRoute. The
kubelet is ours.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from engine_ext.reference.tiny_model import write_tiny_model
from tests.conftest import find_free_ports
from tests.integration import load
from tests.integration.accounts import lost_by_decode, lost_by_prefill
from tests.integration.load import Load
from tests.integration.models import another_version
from tests.integration.processes import BOTH_WAYS, CONNECTORS, Launcher
from tests.k8s import gateway_api, proxies
from tests.k8s.cluster import Cluster, wait_for
from tests.k8s.containers import Containers
from tests.k8s.kubelet import Kubelet
from tests.k8s.pods import Pods
from tests.k8s.releases import Helm, chart_for_old_servers, make_namespace

SERVICE = "router-disagg-router"
ROUTERS = "app.kubernetes.io/instance=router"
ROLES = ("prefill", "decode")
MOST = 3
CLIENTS = 5
FINISHED = "disagg_engine_requests_finished_total"
MODELS = {"blue": "/models/v1", "green": "/models/v2"}
"""Two versions that say the same, and take each other for strangers: KV that goes from one to the
other is refused and computed anew, which is found in the decode engine's counts."""
IN_FLIGHT = "disagg_router_engine_requests_in_flight{"
NO_WEIGHT = {"disagg-router.io/weight": "0"}
SHORTCUTS = ("disagg_router_decode_only_total", "disagg_router_prefill_without_params_total")
MUCH = 120.0
"""Seconds for what takes a few on a machine that has nothing else to do."""


@dataclass(frozen=True)
class Kind:
    """Of a world: what is installed where."""

    namespace: str
    connector: str
    warm_up: str


PULLING = Kind("pulling", CONNECTORS["pull"], "lazy")
PUSHING = Kind("pushing", CONNECTORS["push"], "eager")


@dataclass(frozen=True)
class World:
    """A cluster with the router before no engines yet; clients go to `url`."""

    kind: Kind

    cluster: Cluster
    helm: Helm
    pods: Pods
    kubelet: Kubelet
    containers: Containers
    url: str
    port: int
    liveness_port: int
    engine_ports: tuple[int, int]
    folder: Path

    def router_values(self, **annotations: str) -> str:
        values = {
            "router": {
                "port": self.port,
                "livenessPort": self.liveness_port,
                # A Gateway takes over what is new every two seconds, or later if it stands still.
                "preStop": 5,
                "shutdownDelay": 5,
                "podAnnotations": annotations,
            },
            # Two cores run all of it.
            "settings": {"health-timeout": 10, "warm-up": self.kind.warm_up},
            "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]},
        }
        return written(self.folder / "router.yaml", values)

    def install_engines(self, group: str, **annotations: str) -> None:
        port, side_channel = self.engine_ports
        each = {"args": ["--num-threads=1", "--no-enable-prefix-caching"]}
        engines = {
            "enabled": True,
            "runtime": "reference",
            "model": MODELS[group],
            "servedModelName": "tiny",
            "connector": self.kind.connector,
            "connectorExtraConfig": BOTH_WAYS,
            "group": group,
            "port": port,
            "sideChannelPort": side_channel,
            "preStop": 2,
            "shutdownTimeout": 60,
            "podAnnotations": annotations,
            **dict.fromkeys(ROLES, each),
        }
        values = {"router": {"enabled": False}, "engines": engines}
        self.helm.install(group, "--values", written(self.folder / f"{group}.yaml", values))

    def scale(self, group: str, replicas: int) -> None:
        for role in ROLES:
            path = f"/apis/apps/v1/namespaces/{self.kind.namespace}/deployments"
            name = f"{group}-disagg-router-{role}"
            self.cluster.merge(f"{path}/{name}", {"spec": {"replicas": replicas}})

    def weigh(self, group: str, weight: str) -> None:
        """As `kubectl annotate pods -l disagg-router.io/group=...` does it."""
        for name in self.pods.all(f"disagg-router.io/group={group}"):
            changes = {"metadata": {"annotations": {"disagg-router.io/weight": weight}}}
            self.cluster.merge(f"{self.pods.path}/{name}", changes)

    def living(self, group: str, role: str = "") -> list[str]:
        """Pods that are ready and not about to end."""
        return [
            name
            for name, tenant in self.kubelet.tenants.items()
            if name.startswith(f"{group}-disagg-router-{role}")
            and tenant.is_ready
            and tenant.ends_at is None
        ]

    def has(self, group: str, replicas: int) -> bool:
        """So many of each role, and no other is there any more."""
        assert not self.kubelet.faults, self.kubelet.faults
        left = [
            name
            for name, tenant in self.kubelet.tenants.items()
            if name.startswith(f"{group}-") and not tenant.is_gone
        ]
        counts = [len(self.living(group, role)) for role in ROLES]
        return counts == [replicas] * 2 and len(left) == 2 * replicas

    def finished(self, name: str) -> float:
        """Requests of an engine, those with which it was warmed included."""
        text = fetch(f"http://{self.engine(name)}/metrics").text
        return sum(number for line, number in samples(text) if line.startswith(FINISHED))

    def all_work(self, group: str) -> bool:
        """For clients, too."""
        return all(self.finished(name) > MOST for name in self.living(group))

    def engine(self, name: str) -> str:
        """As the router calls it."""
        return f"{self.kubelet.tenants[name].ip}:{self.engine_ports[0]}"

    def told(self) -> dict[str, float]:
        """The router's metrics; the newest one's."""
        router = self.kubelet.tenants[self.living("router")[-1]]
        url = f"http://{router.ip}:{self.liveness_port}/metrics"
        return dict(samples(fetch(url).text))

    def is_amid(self, group: str) -> bool:
        """All of its decode engines are in the midst of answers."""
        told = self.told()
        engines = [f'engine="{self.engine(name)}"' for name in self.living(group, "decode")]
        busy = [name for name, n in told.items() if name.startswith(IN_FLIGHT) and n]
        return all(any(engine in name for name in busy) for engine in engines)

    def knows(self, engine: str) -> bool:
        return any(f'engine="{engine}"' in name for name in self.told() if "_healthy" in name)


def fetch(url: str) -> httpx.Response:
    return httpx.get(url, timeout=30, trust_env=False)


def samples(text: str) -> Iterator[tuple[str, float]]:
    for line in text.splitlines():
        if line and line[0] != "#":
            name, _, value = line.rpartition(" ")
            yield name, float(value)


def written(file: Path, values: dict[str, Any]) -> str:
    file.write_text(yaml.safe_dump(values))
    return str(file)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory, model: Path) -> list[load.Script]:
    launcher = Launcher(tmp_path_factory.mktemp("logs"), model, find_free_ports)
    with launcher.engine("alone") as alone:
        return load.scripts(alone, 6)


@pytest.fixture
def world(
    request: pytest.FixtureRequest, gateway_cluster: Cluster, tmp_path: Path, model: Path
) -> Iterator[World]:
    kind: Kind = request.param
    cluster, pods = gateway_cluster, Pods(gateway_cluster, kind.namespace)
    public, port, liveness, *engine_ports = find_free_ports(5)
    make_namespace(cluster, kind.namespace)
    gateway_api.create_gateway(cluster, kind.namespace, public)
    helm = Helm("helm4", cluster, kind.namespace, chart_for_old_servers(tmp_path))
    models = {MODELS["blue"]: model, MODELS["green"]: another_version(model, tmp_path / "v2")}
    containers = Containers(cluster, tmp_path, models)
    with ExitStack() as stack:
        stack.enter_context(proxies.traefik(tmp_path, cluster, public))
        kubelet = stack.enter_context(Kubelet(pods, containers))
        world = World(
            kind,
            cluster,
            helm,
            pods,
            kubelet,
            containers,
            f"http://127.0.0.1:{public}",
            port,
            liveness,
            (engine_ports[0], engine_ports[1]),
            tmp_path,
        )
        helm.install("router", "--values", world.router_values())
        yield world


def publish(world: World) -> None:
    """The router's pod as an endpoint of its Service, once it is ready."""
    wait_for("the router is ready", lambda: world.living("router"), MUCH)
    gateway_api.publish(world.pods, SERVICE, world.port, ROUTERS)
    wait_for("the Gateway's way", lambda: is_open(world.url), MUCH)


def is_open(url: str) -> bool:
    try:
        return fetch(f"{url}/v1/models").is_success
    except httpx.TransportError:
        return False


@pytest.mark.timeout(400)
@pytest.mark.parametrize("world", [PULLING], indirect=True)
def test_a_fleet_is_scaled_and_rolled_out_and_no_client_notices(
    world: World, asked: list[load.Script]
) -> None:
    world.install_engines("blue")
    publish(world)
    with Load(world.url, asked, CLIENTS) as clients:
        clients.goes_on(10, MUCH)
        grow(world, clients)
        lose_the_api_server(world, clients)
        shrink(world, clients)
        roll_over(world, clients)
        roll_the_router(world, clients)
    uninstall(world, "green")
    nothing_was_lost(world, clients)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("world", [PUSHING], indirect=True)
def test_a_fleet_that_pushes_is_scaled_and_warmed_ahead_and_no_client_notices(
    world: World, asked: list[load.Script]
) -> None:
    world.install_engines("blue")
    publish(world)
    with Load(world.url, asked, CLIENTS) as clients:
        clients.goes_on(10, MUCH)
        world.scale("blue", 2)
        wait_for("2 + 2", lambda: world.has("blue", 2), MUCH)
        wait_for("all work", lambda: world.all_work("blue"), MUCH)
        wait_for("all pairs are warm", lambda: warm_ups(world) == {"done": 4}, MUCH)
        wait_for("all are amid answers", lambda: world.is_amid("blue"), MUCH)
        world.scale("blue", 1)
        wait_for("1 + 1", lambda: world.has("blue", 1), MUCH)
        clients.goes_on(10, MUCH)
    uninstall(world, "blue")
    nothing_was_lost(world, clients)
    pushed = {name: one.last_words()["pushes_ok"] for name, one in world.containers.engines.items()}
    assert all(pushed[name] > MOST for name in pushed if "-prefill-" in name), pushed


def warm_ups(world: World) -> dict[str, float]:
    """How many came to which end."""
    name = 'disagg_router_warm_ups_total{outcome="'
    return {
        one.removeprefix(name)[:-2]: n for one, n in world.told().items() if one.startswith(name)
    }


def uninstall(world: World, group: str) -> None:
    world.helm("uninstall", group)
    wait_for(f"{group} has gone", lambda: world.has(group, 0), MUCH)


def nothing_was_lost(world: World, clients: Load) -> None:
    """A decoder that leaves without a word, or with its prefiller, may do so in the very moment in
    which it is to be asked to read; then the router gives up what was prefilled, and says so."""
    assert not clients.troubles
    for name, engine in world.containers.engines.items():
        counts = engine.last_words()
        is_prefill = "-prefill-" in name
        lost = lost_by_prefill(counts, CLIENTS) if is_prefill else lost_by_decode(counts)
        assert not lost, f"{name}: {lost}, {json.dumps(counts)}"
    assert not sum(n for name, n in world.told().items() if name.startswith(SHORTCUTS))


def grow(world: World, clients: Load) -> None:
    world.scale("blue", MOST)
    wait_for("3 + 3", lambda: world.has("blue", MOST), MUCH)
    wait_for("all work", lambda: world.all_work("blue"), MUCH)
    clients.goes_on(10, MUCH)


def lose_the_api_server(world: World, clients: Load) -> None:
    """One engine goes meanwhile, and nobody will ever tell."""
    [gone, *_] = world.living("blue", "decode")
    name = world.engine(gone)
    world.cluster.stop_api_server()
    wait_for("trouble is told", lambda: troubles(world) == 2, MUCH)
    clients.goes_on(10, MUCH)
    world.kubelet.evict(gone)
    wait_for(f"{gone} has gone", lambda: world.kubelet.tenants[gone].is_gone, MUCH)
    clients.goes_on(10, MUCH)
    assert world.knows(name)
    world.pods.forget(gone)
    world.cluster.compact()
    world.cluster.start_api_server()
    wait_for("it is known to have gone", lambda: not world.knows(name), MUCH)
    wait_for("no trouble any more", lambda: not troubles(world), MUCH)
    # Its controller has noticed, too: scaled down before, it would keep the one that is not there.
    wait_for("another in its place", lambda: world.has("blue", MOST), MUCH)


def troubles(world: World) -> float:
    return sum(n for name, n in world.told().items() if "_source_trouble" in name)


def shrink(world: World, clients: Load) -> None:
    wait_for("all are amid answers", lambda: world.is_amid("blue"), MUCH)
    world.scale("blue", 1)
    wait_for("1 + 1", lambda: world.has("blue", 1), MUCH)
    clients.goes_on(10, MUCH)


def roll_over(world: World, clients: Load) -> None:
    """Blue gives way to green as in docs/upgrades.md."""
    world.install_engines("green", **NO_WEIGHT)
    wait_for("green", lambda: world.has("green", 1), MUCH)
    clients.goes_on(10, MUCH)
    assert not world.all_work("green"), "it has no weight"
    world.weigh("green", "1")
    wait_for("green works", lambda: world.all_work("green"), MUCH)
    wait_for("blue is amid answers", lambda: world.is_amid("blue"), MUCH)
    world.weigh("blue", "0")
    uninstall(world, "blue")
    clients.goes_on(10, MUCH)


def roll_the_router(world: World, clients: Load) -> None:
    """Its Deployment starts a second one, and ends the first when that is ready; clients are amid
    answers of the first, and stay on their connections to the Gateway."""
    [old] = world.living("router")
    wait_for("green is amid answers", lambda: world.is_amid("green"), MUCH)
    world.helm.upgrade("router", "--values", world.router_values(version="2"))

    def has_ended() -> bool:
        """Endpoints follow the pods meanwhile, as their controller would make them."""
        gateway_api.publish(world.pods, SERVICE, world.port, ROUTERS)
        return world.kubelet.tenants[old].is_gone

    wait_for("the first router has ended", has_ended, MUCH)
    clients.goes_on(10, MUCH)
    assert len(world.living("router")) == 1
    assert not world.kubelet.faults, world.kubelet.faults
