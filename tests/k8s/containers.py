"""What the containers of the chart's pods would run, as processes of this machine.

Command, arguments, variables and mounted files are those of the pod. A process lacks a network and
a file system of its own: it is told its pod's address, and where what is mounted really lies.
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from router.common.child_processes import ChildProcesses
from tests.integration import nursery
from tests.k8s.cluster import Cluster, Manifest
from tests.k8s.kubelet import Process

# Many engines, and other tests at the same time that measure milliseconds.
NICENESS = 10
# Of a probe.
PROBE_SECONDS = 2.0


@dataclass(frozen=True)
class Containers:
    """`models` are where they lie, by their paths in pods; `engines` all that ever ran, by their
    pods' names."""

    cluster: Cluster
    folder: Path
    models: Mapping[str, Path]
    engines: dict[str, nursery.Engine] = field(default_factory=dict)

    def __call__(self, pod: Manifest, ip: str) -> Process:
        name = pod["metadata"]["name"]
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        [container] = pod["spec"]["containers"]
        probe = probe_of(container, ip)
        if container["name"] == "router":
            return Router(self._router(pod, container, ip, folder), probe)
        self.engines[name] = self._engine(name, container, ip, folder)
        return Engine(self.engines[name], probe)

    def _engine(self, name: str, container: Manifest, ip: str, folder: Path) -> nursery.Engine:
        assert container["command"] == ["disagg-engine"]
        here = {path: str(model) for path, model in self.models.items()}
        here |= {"/cache": str(folder), "0.0.0.0": ip, "/etc/disagg/secret": str(self._secret())}
        arguments = [_replaced(one, here) for one in container["args"]]
        variables = {
            one["name"]: _replaced(one["value"], here) if "value" in one else _field(one, ip)
            for one in container["env"]
        }
        del variables["UCX_TCP_PORT_RANGE"]  # all engines of a machine have no room in it
        return nursery.Engine(name, arguments, variables, folder, NICENESS)

    def _secret(self) -> Path:
        """The file of the side channel's Secret, which all engines share."""
        file = self.folder / "side-channel-secret"
        if not file.exists():
            _, whole = tempfile.mkstemp(dir=self.folder)
            # Another pod may read the file while this one writes it.
            Path(whole).write_text("0123456789abcdef0123456789abcdef")
            Path(whole).rename(file)
        return file

    def _router(self, pod: Manifest, container: Manifest, ip: str, folder: Path) -> ChildProcesses:
        mounted = self._mounted(pod, container, {"0.0.0.0": ip}, folder)
        arguments = [_replaced(one, mounted) for one in container["args"]]
        command = [sys.executable, "-m", "router.commands.cli", *arguments]
        family = ChildProcesses(folder)
        environment = {"KUBECONFIG": str(self._kubeconfig(pod, folder))}
        family.start("router", command, "", environment=environment)
        return family

    def _mounted(
        self, pod: Manifest, container: Manifest, here: Mapping[str, str], folder: Path
    ) -> dict[str, str]:
        """ConfigMaps as files, with what is `here`: where they lie, by where they are mounted."""
        namespace, mounted = pod["metadata"]["namespace"], {}
        maps = {
            one["name"]: one["configMap"] for one in pod["spec"]["volumes"] if "configMap" in one
        }
        for mount in container["volumeMounts"]:
            if mount["name"] in maps:
                name = maps[mount["name"]]["name"]
                data = self.cluster.get(f"/api/v1/namespaces/{namespace}/configmaps/{name}")["data"]
                place = folder / mount["name"]
                place.mkdir(exist_ok=True)
                for file, text in data.items():
                    (place / file).write_text(_replaced(text, here))
                mounted[mount["mountPath"]] = str(place)
        return mounted

    def _kubeconfig(self, pod: Manifest, folder: Path) -> Path:
        """The account of the pod, and nobody else's; none where it is not to be mounted."""
        file = folder / "kubeconfig"
        if pod["spec"]["automountServiceAccountToken"]:
            config = json.loads(self.cluster.kubeconfig.read_text())
            account = pod["spec"]["serviceAccountName"]
            token = self.cluster.account_token(pod["metadata"]["namespace"], account)
            config["users"][0]["user"] = {"token": token}
            file.write_text(json.dumps(config))
        return file


@dataclass(frozen=True)
class Engine:
    """A Process."""

    engine: nursery.Engine
    probe: str

    def is_ready(self) -> bool:
        return _answers(self.probe)

    def exit_status(self) -> int | None:
        return self.engine.exit_status()

    def terminate(self) -> None:
        self.engine.terminate()

    def kill(self) -> None:
        self.engine.kill()

    def close(self) -> None:
        self.engine.close()


@dataclass(frozen=True)
class Router:
    """A Process."""

    family: ChildProcesses
    probe: str

    def is_ready(self) -> bool:
        return _answers(self.probe)

    def exit_status(self) -> int | None:
        return self.family.children[0].process.poll()

    def terminate(self) -> None:
        self.family.children[0].process.terminate()

    def kill(self) -> None:
        self.family.children[0].process.kill()

    def close(self) -> None:
        self.kill()
        self.family.stop()


def probe_of(container: Manifest, ip: str) -> str:
    """The URL of its readiness probe."""
    asked = container["readinessProbe"]["httpGet"]
    return f"http://{ip}:{port_of(container, asked['port'])}{asked['path']}"


def port_of(container: Manifest, name: str) -> int:
    [number] = [one["containerPort"] for one in container["ports"] if one["name"] == name]
    return int(number)


def _answers(probe: str) -> bool:
    try:
        return httpx.get(probe, timeout=PROBE_SECONDS, trust_env=False).is_success
    except httpx.TransportError:
        return False


def _replaced(text: str, places: Mapping[str, str]) -> str:
    for place, here in places.items():
        text = text.replace(place, here)
    return text


def _field(variable: Manifest, ip: str) -> str:
    assert variable["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    return ip
