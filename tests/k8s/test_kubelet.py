"""The kubelet of these tests tells what a real one would, and of every process that ends badly."""

from collections.abc import Iterator

import pytest

from tests.k8s.cluster import Cluster, wait_for
from tests.k8s.kubelet import Idle, Kubelet
from tests.k8s.pods import Pods
from tests.k8s.releases import make_namespace


class Stubborn(Idle):
    """Hears no SIGTERM."""

    def terminate(self) -> None:
        return


class Broken(Idle):
    def exit_status(self) -> int:
        return 3


class Slow(Idle):
    """Not ready before it is told that it is."""

    is_up = False

    def is_ready(self) -> bool:
        return self.is_up


KINDS = {"idle": Idle, "stubborn": Stubborn, "broken": Broken}


@pytest.fixture
def pods(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Pods]:
    namespace = request.node.name.replace("_", "-")[:63].strip("-")
    make_namespace(cluster, namespace)
    yield Pods(cluster, namespace)
    cluster.request("DELETE", f"/api/v1/namespaces/{namespace}")


def create(pods: Pods, name: str) -> None:
    hook = {"preStop": {"exec": {"command": ["sleep", "1"]}}}
    container = {"name": "x", "image": "none:1", "lifecycle": hook}
    spec = {"containers": [container], "terminationGracePeriodSeconds": 2}
    pods.cluster.create(pods.path, {"metadata": {"name": name}, "spec": spec})


def is_ready(pods: Pods, name: str) -> bool:
    conditions = pods.all()[name]["status"].get("conditions", [])
    return {"type": "Ready", "status": "True"} in [
        {key: one[key] for key in ("type", "status")} for one in conditions
    ]


def test_a_pod_is_ready_when_its_process_is(pods: Pods) -> None:
    process = Slow()
    with Kubelet(pods, lambda pod, ip: process) as kubelet:
        create(pods, "slow")
        wait_for("it runs", lambda: pods.all()["slow"]["status"]["phase"] == "Running")
        assert not is_ready(pods, "slow")
        process.is_up = True
        wait_for("it is ready", lambda: is_ready(pods, "slow"))
    assert not kubelet.faults


def test_a_pod_runs_its_hook_before_it_is_terminated(pods: Pods) -> None:
    moment = 0.0
    process = Idle()
    with Kubelet(pods, lambda pod, ip: process, lambda: moment) as kubelet:
        create(pods, "idle")
        wait_for("it is ready", lambda: kubelet.tenants and is_ready(pods, "idle"))
        pods.delete("idle")
        wait_for("it is told", lambda: kubelet.tenants["idle"].ends_at == 1)
        assert process.exit_status() is None
        moment = 1.0
        wait_for("it is gone", lambda: not pods.all())
    assert not kubelet.faults


def test_who_does_not_end_is_killed_and_told_of(pods: Pods) -> None:
    with Kubelet(pods, lambda pod, ip: KINDS[pod["metadata"]["name"]]()) as kubelet:
        for name in KINDS:
            create(pods, name)
        wait_for("all are ready", lambda: all(is_ready(pods, n) for n in ("idle", "stubborn")))
        for name in ("idle", "stubborn"):
            pods.delete(name)
        wait_for("they are gone", lambda: pods.all().keys() == {"broken"})
    assert kubelet.faults == ["broken ended with status 3", "stubborn was killed after 2 s"]
