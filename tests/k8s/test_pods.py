"""What the chart's pods may do, and how they begin and end."""

import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine_ext.common.config import ConnectorConfig
from router.settings import ADMIN_URL, Settings, load, read_secret, variable_of
from tests.k8s.chart import SETS, Manifest, containers, only, pods, render, rendered

ENGINES = [(name, role) for name in ("engines", "demo") for role in ("prefill", "decode")]
ENGINES.append(("both-roles", "both"))
ENGINES_LABEL = "disagg-router.io/engines"
PODS = [(name, pod) for name in SETS for pod, _ in pods(rendered(name))]


def pod_of(name: str, deployment: str) -> Manifest:
    return dict(pods(rendered(name)))[deployment]


def settings_of(manifests: tuple[Manifest, ...] | list[Manifest]) -> dict[str, Any]:
    settings = yaml.safe_load(only(manifests, "ConfigMap")["data"]["config.yaml"])
    assert isinstance(settings, dict)
    return settings


@pytest.mark.parametrize(("name", "deployment"), PODS)
def test_no_container_may_more_than_it_needs(name: str, deployment: str) -> None:
    pod = pod_of(name, deployment)
    rules = pod["securityContext"]
    assert rules["runAsNonRoot"] is True
    assert rules["runAsUser"] >= 10000
    assert rules["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in containers(pod):
        own = container["securityContext"]
        assert own["allowPrivilegeEscalation"] is False
        assert own["readOnlyRootFilesystem"] is True
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
        assert "memory" in container["resources"]["limits"]
    assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC"}
    assert not [volume for volume in pod["volumes"] if "hostPath" in volume]


@pytest.mark.parametrize(("name", "deployment"), PODS)
def test_what_is_probed_is_a_port_of_the_container(name: str, deployment: str) -> None:
    for container in pod_of(name, deployment)["containers"]:
        ports = [port["name"] for port in container["ports"]]
        numbers = [port["containerPort"] for port in container["ports"]]
        assert len(set(ports)) == len(set(numbers)) == len(ports)
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container[probe]["httpGet"]["port"] in ports


@pytest.mark.parametrize(("name", "deployment"), PODS)
def test_what_is_mounted_is_a_volume(name: str, deployment: str) -> None:
    pod = pod_of(name, deployment)
    volumes = [volume["name"] for volume in pod["volumes"]]
    mounted = {mount["name"] for each in containers(pod) for mount in each["volumeMounts"]}
    assert mounted == set(volumes)
    for container in containers(pod):
        paths = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert len(set(paths)) == len(paths)


@pytest.mark.parametrize(("name", "deployment"), PODS)
def test_a_pod_has_time_to_end(name: str, deployment: str) -> None:
    pod = pod_of(name, deployment)
    [container] = pod["containers"]
    took = _pre_stop(container) + _shutdown(name, container)
    assert took + 6 <= pod["terminationGracePeriodSeconds"]  # serve.UVICORN_CLOSE_TIMEOUT_S


def _pre_stop(container: Manifest) -> float:
    [program, seconds] = container["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    assert float(seconds) > 0
    return float(seconds)


def _shutdown(name: str, container: Manifest) -> float:
    if container["name"] == "router":
        settings = settings_of(rendered(name))
        return float(settings["shutdown-delay"] + settings["shutdown-timeout"])
    [flag] = [one for one in container["args"] if one.startswith("--shutdown-timeout=")]
    return float(flag.partition("=")[2])


@pytest.mark.parametrize("name", SETS)
def test_the_router_is_alive_on_one_port_and_ready_on_another(name: str) -> None:
    [router] = pod_of(name, "r-disagg-router")["containers"]
    assert router["livenessProbe"]["httpGet"] == {"path": "/health", "port": "liveness"}
    assert router["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "http"}
    settings = settings_of(rendered(name))
    ports = {port["name"]: port["containerPort"] for port in router["ports"]}
    assert ports == {"http": settings["port"], "liveness": settings["liveness-port"]}


@pytest.mark.parametrize("kind", ["PodMonitor", "ServiceMonitor"])
def test_metrics_have_a_port_of_their_own_where_one_is_wanted(kind: str, tmp_path: Path) -> None:
    wanted = f"router.metricsPort=9100,monitoring.kind={kind}"
    manifests = render("production", "--set", wanted)
    file = tmp_path / "config.yaml"
    file.write_text(only(manifests, "ConfigMap")["data"]["config.yaml"])
    settings = load({"config": file})
    assert (settings.metrics_host, settings.metrics_port) == ("0.0.0.0", 9100)
    [container] = dict(pods(manifests))["r-disagg-router"]["containers"]
    assert {"name": "metrics", "containerPort": 9100, "protocol": "TCP"} in container["ports"]
    spec = only(manifests, kind)["spec"]
    [scraped] = spec["podMetricsEndpoints" if kind == "PodMonitor" else "endpoints"]
    assert scraped["port"] == "metrics"
    if kind == "ServiceMonitor":
        [_, port] = only(manifests, "Service")["spec"]["ports"]
        assert (port["port"], port["targetPort"]) == (9100, "metrics")
    _, scrapers = only(manifests, "NetworkPolicy")["spec"]["ingress"]
    assert [port["port"] for port in scrapers["ports"]] == [8001, 9100]


@pytest.mark.parametrize("name", SETS)
def test_the_routers_settings_are_ones_that_it_takes(name: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(only(rendered(name), "ConfigMap")["data"]["config.yaml"])
    settings = load({"config": file})
    assert (settings.port, settings.liveness_port) == (8000, 8001)
    assert settings.host == "0.0.0.0"  # all of the pod's interfaces


def test_workers_without_a_redis_can_be_had(tmp_path: Path) -> None:
    off = ("--set", "settings.workers=4", "--set-string", "settings.conversation-store=off")
    file = tmp_path / "config.yaml"
    file.write_text(only(render("default", *off), "ConfigMap")["data"]["config.yaml"])
    assert load({"config": file}).conversation_store == "off"


def test_the_admin_api_and_drain_have_the_token_from_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = ("--set", "admin.tokenSecret.name=admin", "--set", "admin.tokenSecret.key=t")
    manifests = render("default", "--set", "admin.enabled=true", *secret)
    file, token = tmp_path / "config.yaml", tmp_path / "token"
    file.write_text(only(manifests, "ConfigMap")["data"]["config.yaml"])
    token.write_text("0123456789abcdef0123456789abcdef")
    [(_, pod)] = pods(manifests)
    variables = {one["name"]: one["value"] for one in pod["containers"][0]["env"]}
    assert variables.keys() == {ADMIN_URL, variable_of("admin_token_file")}
    directory, _, name = variables[variable_of("admin_token_file")].rpartition("/")
    [volume] = [one for one in pod["volumes"] if one["name"] == "secrets"]
    assert volume["projected"]["sources"] == [
        {"secret": {"name": "admin", "items": [{"key": "t", "path": name}]}}
    ]
    mounts = {one["name"]: one["mountPath"] for one in pod["containers"][0]["volumeMounts"]}
    assert mounts["secrets"] == directory
    monkeypatch.setenv(variable_of("admin_token_file"), str(token))
    settings = load({"config": file})
    assert read_secret(settings, "admin_token") == token.read_text()
    assert variables[ADMIN_URL] == f"http://127.0.0.1:{settings.admin_port}"
    assert settings.admin_host == "127.0.0.1"


def test_without_the_admin_api_its_secret_is_not_asked_for() -> None:
    manifests = render("default", "--set", "admin.tokenSecret.name=admin")
    [(_, pod)] = pods(manifests)
    assert not any(one["name"] == "secrets" for one in pod["volumes"])


def test_the_page_is_served_with_the_token_from_a_secret(tmp_path: Path) -> None:
    secret = ("--set", "ui.tokenSecret.name=page", "--set", "ui.tokenSecret.key=t")
    manifests = render("default", "--set", "ui.enabled=true", *secret)
    file, token = tmp_path / "config.yaml", tmp_path / "token"
    given = only(manifests, "ConfigMap")["data"]["config.yaml"]
    path = yaml.safe_load(given)["ui-token-file"]
    directory, _, name = path.rpartition("/")
    [(_, pod)] = pods(manifests)
    [volume] = [one for one in pod["volumes"] if one["name"] == "secrets"]
    assert volume["projected"]["sources"] == [
        {"secret": {"name": "page", "items": [{"key": "t", "path": name}]}}
    ]
    mounts = {one["name"]: one["mountPath"] for one in pod["containers"][0]["volumeMounts"]}
    assert mounts["secrets"] == directory
    token.write_text("0123456789abcdef0123456789abcdef")
    file.write_text(given.replace(path, str(token)))
    settings = load({"config": file})
    assert (settings.ui, read_secret(settings, "ui_token")) == (True, token.read_text())


def test_without_the_page_its_secret_is_not_asked_for(tmp_path: Path) -> None:
    manifests = render("default", "--set", "ui.tokenSecret.name=page")
    [(_, pod)] = pods(manifests)
    assert not any(one["name"] == "secrets" for one in pod["volumes"])
    assert "ui" not in yaml.safe_load(only(manifests, "ConfigMap")["data"]["config.yaml"])


def test_large_numbers_stay_whole(tmp_path: Path) -> None:
    manifests = render("default", "--set", "settings.max-held-bodies=34359738368")
    file = tmp_path / "config.yaml"
    file.write_text(only(manifests, "ConfigMap")["data"]["config.yaml"])
    assert load({"config": file}).max_held_bodies == 32 * 1024**3


def test_every_setting_is_the_charts_or_the_operators() -> None:
    """A new setting is known to the schema, or is set by the chart."""
    operators = render("default", "--set", "settings.request-timeout=60")
    assert settings_of(operators)["request-timeout"] == 60
    owned = settings_of(rendered("production")).keys()
    assert {"port", "liveness-port", "shutdown-delay", "conversation-store"} <= owned


def test_settings_change_the_pod_so_that_it_starts_anew() -> None:
    def annotations(*more: str) -> Any:
        deployment = only(render("default", *more), "Deployment")
        return deployment["spec"]["template"]["metadata"]["annotations"]

    assert annotations() != annotations("--set", "settings.log-level=debug")


def test_a_new_chart_restarts_no_engine() -> None:
    for _, labels in _pod_labels("engines"):
        assert not labels.keys() & {"helm.sh/chart", "app.kubernetes.io/version"}


def _pod_labels(name: str) -> list[tuple[str, dict[str, str]]]:
    return [
        (one["metadata"]["name"], one["spec"]["template"]["metadata"]["labels"])
        for one in rendered(name)
        if one["kind"] == "Deployment"
    ]


@pytest.mark.parametrize("name", SETS)
def test_who_discovers_may_read_pods_of_one_namespace_and_nothing_else(name: str) -> None:
    role, binding = only(rendered(name), "Role"), only(rendered(name), "RoleBinding")
    assert role["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    ]
    account = only(rendered(name), "ServiceAccount")["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": "here"}]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert role["metadata"]["namespace"] == binding["metadata"]["namespace"] == "here"
    assert pod_of(name, "r-disagg-router")["serviceAccountName"] == account
    assert not [one for one in rendered(name) if one["kind"].startswith("Cluster")]


def test_pods_of_another_namespace_are_read_there() -> None:
    manifests = render("default", "--set", "discovery.namespace=there")
    for kind in ("Role", "RoleBinding"):
        assert only(manifests, kind)["metadata"]["namespace"] == "there"
    assert only(manifests, "RoleBinding")["subjects"][0]["namespace"] == "here"
    assert settings_of(manifests)["kubernetes-namespace"] == "there"


@pytest.mark.parametrize(("name", "deployment"), PODS)
def test_only_who_discovers_has_a_token(name: str, deployment: str) -> None:
    has = pod_of(name, deployment)["automountServiceAccountToken"]
    assert has is (deployment == "r-disagg-router")
    assert only(rendered(name), "ServiceAccount")["automountServiceAccountToken"] is False


def test_without_discovery_there_is_no_role_and_no_token() -> None:
    manifests = render(
        "default",
        *("--set", "discovery.enabled=false", "--set", "settings.prefiller-hosts={p1,p2}"),
        *("--set", "settings.prefiller-ports={8100}", "--set", "settings.decoder-hosts={d1}"),
        *("--set", "settings.decoder-ports={8200}"),
    )
    assert not {one["kind"] for one in manifests} & {"Role", "RoleBinding"}
    [(_, pod)] = pods(manifests)
    assert pod["automountServiceAccountToken"] is False
    assert Settings(**_underscored(settings_of(manifests))).prefillers[1].host == "p2"


def _underscored(settings: dict[str, Any]) -> dict[str, Any]:
    return {key.replace("-", "_"): value for key, value in settings.items()}


def test_secrets_are_files_and_none_is_in_the_settings() -> None:
    settings = settings_of(rendered("production"))
    pod = pod_of("production", "r-disagg-router")
    [volume] = [one for one in pod["volumes"] if one["name"] == "secrets"]
    [mount] = [one for one in pod["containers"][0]["volumeMounts"] if one["name"] == "secrets"]
    files = {
        f"{mount['mountPath']}/{item['path']}"
        for source in volume["projected"]["sources"]
        for item in source["secret"]["items"]
    }
    keys = ("conversation-store-password-file", "conversation-store-key-file")
    assert files >= {settings[key] for key in keys}
    assert mount["readOnly"] is True


def test_more_secrets_can_be_had_as_files() -> None:
    more = '[{"name":"tenants","key":"keys.yaml","path":"api-keys"}]'
    [(_, pod)] = pods(render("default", "--set-json", f"router.secretFiles={more}"))
    [volume] = [one for one in pod["volumes"] if one["name"] == "secrets"]
    [source] = volume["projected"]["sources"]
    assert source["secret"]["items"] == [{"key": "keys.yaml", "path": "api-keys"}]


@pytest.mark.parametrize(("name", "role"), ENGINES)
def test_engines_are_found_by_the_router_beside_them(name: str, role: str) -> None:
    settings = settings_of(rendered(name))
    selector = settings[f"kubernetes-{'decode' if role == 'both' else role}-selector"]
    wanted = dict(one.split("=") for one in selector.split(","))
    found = [pod for pod, labels in _pod_labels(name) if wanted.items() <= labels.items()]
    assert found == [f"r-disagg-router-{role}"]
    [engine] = pod_of(name, found[0])["containers"]
    assert settings["kubernetes-port"] in [port["name"] for port in engine["ports"]]


@pytest.mark.parametrize(("name", "role"), ENGINES)
def test_engines_say_where_they_are_and_how_kv_moves(
    name: str, role: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    [engine] = pod_of(name, f"r-disagg-router-{role}")["containers"]
    variables = {one["name"]: one for one in engine["env"]}
    host = variables["VLLM_NIXL_SIDE_CHANNEL_HOST"]
    assert host["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    raw = yaml.safe_load(engine["args"][engine["args"].index("--kv-transfer-config") + 1])
    extra = raw["kv_connector_extra_config"]
    if "side_channel_secret_file" in extra:
        secret = tmp_path / "secret"
        secret.write_text("0123456789abcdef0123456789abcdef")
        extra["side_channel_secret_file"] = str(secret)
    raw.pop("kv_connector_module_path", None)  # vLLM's own
    with caplog.at_level(logging.WARNING):
        config = ConnectorConfig.from_kv_transfer_config(raw)
    assert not caplog.messages
    assert config.bidirectional
    assert config.load_failure_policy == ("fail" if role == "prefill" else "recompute")


def test_an_engine_has_a_gpu_for_each_rank_and_a_network_device() -> None:
    [engine] = pod_of("engines", "r-disagg-router-prefill")["containers"]
    limits = engine["resources"]["limits"]
    assert (limits["nvidia.com/gpu"], limits["rdma/ib"]) == ("2", "1")
    assert "--tensor-parallel-size=2" in engine["args"]
    [engine] = pod_of("demo", "r-disagg-router-prefill")["containers"]
    assert "nvidia.com/gpu" not in engine["resources"]["limits"]


def test_strangers_reach_no_side_channel() -> None:
    [policy] = [
        one
        for one in rendered("engines")
        if one["kind"] == "NetworkPolicy" and one["metadata"]["name"].endswith("-engines")
    ]
    [between, http] = policy["spec"]["ingress"]
    assert between["from"] == [
        {"podSelector": {"matchExpressions": [{"key": ENGINES_LABEL, "operator": "Exists"}]}}
    ]
    assert {5600, 20000} == {port["port"] for port in between["ports"]}
    assert [port["port"] for port in http["ports"]] == [8000]
    for pod, labels in _pod_labels("engines"):
        assert (ENGINES_LABEL in labels) is (pod != "r-disagg-router")
