"""Pods as a scheduler and a kubelet would have them: they say that they run, and where.

Addresses are of 127.0.0.0/8, so that a real process can play a pod at an address of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import httpx

from tests.k8s.cluster import Cluster, Manifest

NODE = "node-1"
NODES = "/api/v1/nodes"


@dataclass(frozen=True)
class Pods:
    """Those of one namespace."""

    cluster: Cluster
    namespace: str = "default"

    @property
    def path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods"

    def run(self, name: str, ip: str, labels: Mapping[str, str], *, ready: bool = True) -> None:
        """A new pod, created, scheduled and running."""
        containers = [{"name": "engine", "image": "none:1"}]
        metadata = {"name": name, "labels": dict(labels)}
        self.cluster.create(self.path, {"metadata": metadata, "spec": {"containers": containers}})
        self.schedule(name)
        self.report(name, ip, ready=ready)

    def schedule(self, name: str) -> None:
        """A pod without a node is gone as soon as it is deleted; one that has a node terminates."""
        try:
            self.cluster.get(f"{NODES}/{NODE}")
        except httpx.HTTPStatusError:
            self.cluster.create(NODES, {"metadata": {"name": NODE}})
        target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
        binding = {"metadata": {"name": name}, "target": target}
        self.cluster.create(f"{self.path}/{name}/binding", binding)

    def report(self, name: str, ip: str, *, ready: bool) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": now}
        status = {
            "phase": "Running",
            "podIP": ip,
            "podIPs": [{"ip": ip}],
            "startTime": now,
            "conditions": [condition],
        }
        self.cluster.merge(f"{self.path}/{name}/status", {"status": status})

    def delete(self, name: str) -> None:
        """From now on it terminates: the kubelet sends it SIGTERM, and it is still there."""
        self.cluster.request("DELETE", f"{self.path}/{name}")

    def end(self, name: str) -> None:
        """Its processes have ended, and it is gone."""
        self.cluster.request("DELETE", f"{self.path}/{name}", {"gracePeriodSeconds": 0})

    def forget(self, name: str) -> None:
        """It is gone, and nobody is told: see Cluster.forget."""
        self.cluster.forget(f"pods/{self.namespace}/{name}")

    def all(self, selector: str = "") -> dict[str, Manifest]:
        query = f"?labelSelector={selector}" if selector else ""
        return {
            pod["metadata"]["name"]: pod for pod in self.cluster.get(self.path + query)["items"]
        }
