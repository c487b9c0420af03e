"""What `make test-k8s` shares: one control plane for all tests of a process."""

from collections.abc import Iterator

import pytest

from tests.k8s import gateway_api
from tests.k8s.cluster import Cluster
from tests.k8s.pods import Pods

# Kubernetes 1.20's own EndpointSlice would stand where the CRD of the newer one goes.
NO_OLD_SLICES = "--runtime-config=discovery.k8s.io/v1beta1=false"


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with Cluster(NO_OLD_SLICES) as cluster:
        yield cluster


@pytest.fixture
def pods(cluster: Cluster) -> Iterator[Pods]:
    pods = Pods(cluster)
    yield pods
    for name in pods.all():
        pods.end(name)


@pytest.fixture(scope="session")
def gateway_cluster(cluster: Cluster) -> Cluster:
    """The same, with the Gateway API."""
    gateway_api.install(cluster)
    return cluster
