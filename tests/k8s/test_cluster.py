"""The control plane of these tests is a real one, and does to watchers what those do in life."""

import json
import ssl
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.k8s.cluster import Cluster
from tests.k8s.pods import Pods

LABELS = {"role": "decode"}


def test_a_pod_runs_terminates_and_is_gone(pods: Pods) -> None:
    pods.run("a", "127.1.0.1", LABELS)
    pod = pods.all("role=decode")["a"]
    assert pod["status"]["podIP"] == "127.1.0.1"
    assert pod["status"]["conditions"][0]["status"] == "True"
    pods.delete("a")
    pod = pods.all()["a"]
    assert pod["metadata"]["deletionTimestamp"], "it is told to go, and still there"
    pods.end("a")
    assert not pods.all()


def test_only_who_may_is_answered(cluster: Cluster) -> None:
    stranger = {"authorization": f"Bearer {cluster.account_token('default', 'default')}"}
    with pytest.raises(httpx.HTTPStatusError, match='default:default" cannot list resource "pods"'):
        cluster.request("GET", Pods(cluster).path, headers=stranger)
    with pytest.raises(httpx.HTTPStatusError, match="401"):
        cluster.request("GET", Pods(cluster).path, headers={"authorization": "Bearer nobody"})


def test_whoever_starts_the_api_server_may_leave(cluster: Cluster) -> None:
    """A child is killed with the thread that forked it, if nothing is done about it."""
    cluster.stop_api_server()
    with ThreadPoolExecutor(1) as executor:
        executor.submit(cluster.start_api_server).result()
    assert cluster.get("/version")["minor"] == "20"


def test_a_deletion_in_the_gap_is_told_to_nobody(cluster: Cluster, pods: Pods) -> None:
    """A watcher that goes on where it was is told that its past is gone, and no more."""
    pods.run("stays", "127.1.0.1", LABELS)
    pods.run("goes", "127.1.0.2", LABELS)
    version = cluster.get(pods.path)["metadata"]["resourceVersion"]
    cluster.stop_api_server()
    pods.forget("goes")
    cluster.compact()
    cluster.start_api_server()
    assert list(pods.all()) == ["stays"]
    event = _first_event(cluster, f"{pods.path}?watch=true&resourceVersion={version}")
    assert (event["type"], event["object"]["code"]) == ("ERROR", 410)


def _first_event(cluster: Cluster, path: str) -> dict[str, Any]:
    trust = ssl.create_default_context(cafile=str(cluster.ca))
    token = {"authorization": f"Bearer {cluster.token}"}
    with (
        httpx.Client(base_url=cluster.url, verify=trust, timeout=60) as client,
        client.stream("GET", path, headers=token) as answer,
    ):
        event: dict[str, Any] = json.loads(next(answer.iter_lines()))
        return event
