"""The chart in a cluster: installed, upgraded, rolled back and uninstalled by real Helms."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.k8s.chart import CHART, helm
from tests.k8s.cluster import Cluster, wait_for


def chart_for_old_servers(folder: Path) -> Path:
    """The chart without the line that says which Kubernetes it wants: ours is older."""
    chart = folder / "disagg-router"
    shutil.copytree(CHART, chart)
    file = chart / "Chart.yaml"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith("kubeVersion:")]
    assert len(kept) == len(lines) - 1
    file.write_text("".join(kept), encoding="utf-8")
    return chart


def make_namespace(cluster: Cluster, name: str) -> None:
    cluster.create("/api/v1/namespaces", {"metadata": {"name": name}})
    account = f"/api/v1/namespaces/{name}/serviceaccounts/default"

    def has_account() -> bool:
        try:
            return bool(cluster.get(account).get("secrets"))
        except httpx.HTTPStatusError:
            return False

    wait_for(f"the account of {name}", has_account)


@dataclass(frozen=True)
class Helm:
    """One Helm, one cluster, one namespace, one chart."""

    which: str
    cluster: Cluster
    namespace: str
    chart: Path

    def install(self, release: str, *values: str) -> str:
        return self("install", release, self.chart, *values)

    def upgrade(self, release: str, *values: str) -> str:
        return self("upgrade", release, self.chart, *values)

    def __call__(self, *arguments: str | Path) -> str:
        """What it says. Raises AssertionError with what it complains of."""
        done = helm(
            self.which, *arguments, "-n", self.namespace, kubeconfig=self.cluster.kubeconfig
        )
        assert done.returncode == 0, f"{self.which} {arguments}: {done.stdout}{done.stderr}"
        return done.stdout
