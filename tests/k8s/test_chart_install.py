"""The chart's life on a real API server: what both Helms install, change, take back and remove; and
what its account may do there."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.k8s.chart import HELMS, Manifest, helm
from tests.k8s.cluster import Cluster, wait_for
from tests.k8s.kubelet import Kubelet, idle
from tests.k8s.pods import Pods
from tests.k8s.releases import Helm, chart_for_old_servers, make_namespace

RELEASE, NAME = "r", "r-disagg-router"
WAIT = ("--wait", "--timeout", "200s")
QUICK = ("--set", "router.preStop=1,engines.preStop=1")
FLEET = (*QUICK, "--set", "engines.enabled=true,engines.runtime=reference")
# What an old API server knows. Disruption budgets, autoscalers and ranges of ports, as the engines'
# policy has them, came later: these are checked without one.
LIMITS = ("--set", "networkPolicy.enabled=true,networkPolicy.engines=false")
ROUTE = (
    *("--set", "httpRoute.enabled=true"),
    *("--set-json", 'httpRoute.parentRefs=[{"name":"public"}]'),
)
KINDS = (
    "deployments,services,configmaps,serviceaccounts,roles,rolebindings,networkpolicies,httproutes"
)
BROUGHT = {
    *("Deployment", "Service", "ConfigMap", "ServiceAccount", "Role", "RoleBinding"),
    *("NetworkPolicy", "HTTPRoute"),
}
TRACES = f"{KINDS},replicasets,pods,secrets,endpoints"
EVERYBODY = "selfsubject"
"""What anyone may ask about himself."""


@pytest.fixture(params=HELMS)
def released(
    request: pytest.FixtureRequest, gateway_cluster: Cluster, tmp_path: Path
) -> Iterator[Helm]:
    """Where what is deployed gets ready."""
    namespace = f"life-{request.param}"
    make_namespace(gateway_cluster, namespace)
    chart = chart_for_old_servers(tmp_path)
    with Kubelet(Pods(gateway_cluster, namespace), idle) as kubelet:
        yield Helm(request.param, gateway_cluster, namespace, chart)
    assert not kubelet.faults


@pytest.mark.timeout(400)
def test_it_is_installed_upgraded_rolled_back_and_leaves_nothing(released: Helm) -> None:
    before = names(released, TRACES)
    released.install(RELEASE, *FLEET, *ROUTE, *LIMITS, *WAIT)
    assert ready(released) == {NAME: 1, f"{NAME}-prefill": 1, f"{NAME}-decode": 1}
    secret = side_channel_secret(released)
    installed = contents(released)
    assert {kind for kind, _ in installed} == BROUGHT
    more = ("--set", "router.replicas=2", "--set", "settings.max-engine-requests=7")
    released.upgrade(RELEASE, *FLEET, *LIMITS, *more, *WAIT)
    assert ready(released) == {NAME: 2, f"{NAME}-prefill": 1, f"{NAME}-decode": 1}
    assert side_channel_secret(released) == secret, "old and new engines share it"
    upgraded = contents(released)
    assert "max-engine-requests: 7" in upgraded["ConfigMap", NAME]["data"]["config.yaml"]
    assert installed.keys() - upgraded.keys() == {("HTTPRoute", NAME)}
    released("rollback", RELEASE, "1", *WAIT)
    assert contents(released) == installed
    assert side_channel_secret(released) == secret
    history = json.loads(released("history", RELEASE, "-o", "json"))
    assert [one["status"] for one in history] == ["superseded", "superseded", "deployed"]
    released("uninstall", RELEASE, *WAIT)
    wait_for("nothing is left", lambda: names(released, TRACES) == before)


@pytest.mark.timeout(300)
def test_what_helm_3_has_installed_helm_4_upgrades(
    gateway_cluster: Cluster, tmp_path: Path
) -> None:
    make_namespace(gateway_cluster, "from-3-to-4")
    old, new = (
        Helm(which, gateway_cluster, "from-3-to-4", tmp_path / "disagg-router") for which in HELMS
    )
    chart_for_old_servers(tmp_path)
    old.install(RELEASE)
    new.upgrade(RELEASE, "--set", "router.replicas=2", "--set", "settings.max-engine-requests=7")
    upgraded = contents(new)
    assert "max-engine-requests: 7" in upgraded["ConfigMap", NAME]["data"]["config.yaml"]
    assert upgraded["Deployment", NAME]["spec"]["replicas"] == 2
    new("uninstall", RELEASE)
    assert not contents(old)


def objects(released: Helm, kinds: str) -> list[Manifest]:
    found = helm(
        "kubectl",
        *("get", kinds, "-n", released.namespace, "-o", "json"),
        kubeconfig=released.cluster.kubeconfig,
    )
    assert found.returncode == 0, found.stderr
    items: list[Manifest] = json.loads(found.stdout)["items"]
    return items


def side_channel_secret(released: Helm) -> str:
    secrets = {one["metadata"]["name"]: one["data"] for one in objects(released, "secrets")}
    return str(secrets[f"{NAME}-side-channel"]["secret"])


def names(released: Helm, kinds: str) -> set[tuple[str, str]]:
    return {(one["kind"], one["metadata"]["name"]) for one in objects(released, kinds)}


def ready(released: Helm) -> dict[str, int]:
    return {
        one["metadata"]["name"]: one["status"].get("readyReplicas", 0)
        for one in objects(released, "deployments")
    }


def contents(released: Helm) -> dict[tuple[str, str], Manifest]:
    """What somebody wrote, of all that the release has brought."""
    return {
        (one["kind"], one["metadata"]["name"]): {
            key: value
            for key, value in {**one, **one["metadata"]}.items()
            if key in ("spec", "data", "rules", "subjects", "roleRef", "labels")
        }
        for one in objects(released, KINDS)
        if one["metadata"].get("labels", {}).get("app.kubernetes.io/instance") == RELEASE
    }


@pytest.fixture(scope="module")
def discovering(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """A router that looks for engines where it is itself, and one that looks elsewhere."""
    chart = chart_for_old_servers(tmp_path_factory.mktemp("chart"))
    made = [Helm("helm4", cluster, name, chart) for name in ("here", "there", "elsewhere")]
    for each in made:
        make_namespace(cluster, each.namespace)
    made[0].install(RELEASE)
    made[2].install(RELEASE, "--set", "discovery.namespace=there")
    return made[0]


MAY_NOT = (
    *("create pods", "update pods", "patch pods", "delete pods", "deletecollection pods"),
    *(f"create pods --subresource={sub}" for sub in ("exec", "attach", "portforward", "eviction")),
    *("get pods --subresource=log", "patch pods --subresource=status"),
    *("get secrets", "list secrets", "watch secrets", "get configmaps", "list services"),
    *("list nodes", "list namespaces", "list deployments.apps", "patch deployments.apps"),
    *(
        "create serviceaccounts --subresource=token",
        "impersonate serviceaccounts",
        "create rolebindings",
    ),
    *("list endpointslices.discovery.k8s.io", "get leases.coordination.k8s.io", "* *"),
)


def can(asking: Helm, what: str, where: str, account: str = "here") -> str:
    """kubectl's answer: yes or no."""
    done = helm(
        "kubectl",
        *("auth", "can-i", *what.split(), "-n", where),
        f"--as=system:serviceaccount:{account}:{NAME}",
        kubeconfig=asking.cluster.kubeconfig,
    )
    return (done.stdout.split() or [done.stderr])[-1]


@pytest.mark.parametrize("verb", ["get", "list", "watch"])
def test_the_router_may_read_the_pods_where_it_looks_for_engines(
    discovering: Helm, verb: str
) -> None:
    assert can(discovering, f"{verb} pods", "here") == "yes"
    assert can(discovering, f"{verb} pods", "there", account="elsewhere") == "yes"
    for where in ("there", "default", "kube-system"):
        assert can(discovering, f"{verb} pods", where) == "no"
    assert can(discovering, f"{verb} pods", "elsewhere", account="elsewhere") == "no"


def test_the_router_may_do_nothing_else(discovering: Helm) -> None:
    assert [what for what in MAY_NOT if can(discovering, what, "here") != "no"] == []
    assert can(discovering, "list pods --all-namespaces", "here") == "no"


def test_there_is_no_rule_for_it_but_one(discovering: Helm) -> None:
    """All that the API server itself knows of, asked with the account's own token."""
    cluster = discovering.cluster
    token = {"authorization": f"Bearer {cluster.account_token('here', NAME)}"}
    asked = {"spec": {"namespace": "here"}}
    path = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
    rules = cluster.request("POST", path, asked, token)["status"]["resourceRules"]
    own = [one for one in rules if not one["resources"][0].startswith(EVERYBODY)]
    assert own == [{"verbs": ["get", "list", "watch"], "apiGroups": [""], "resources": ["pods"]}]
    pods = "/api/v1/namespaces/{}/pods"
    assert cluster.request("GET", pods.format("here"), headers=token)["kind"] == "PodList"
    with pytest.raises(httpx.HTTPStatusError, match='cannot list resource "pods"'):
        cluster.request("GET", pods.format("there"), headers=token)
