"""The chart by itself: what Helm 3 and 4 make of it, and whether Kubernetes would take that."""

import json
from pathlib import Path

import jsonschema
import msgspec
import pytest
import yaml

from router.fleet.engine import EngineRole
from router.fleet.sources.kubernetes import read_pod
from router.fleet.sources.pod_api import Pod
from router.telemetry.metrics import Metrics
from tests.k8s.chart import (
    CHART,
    GOLDEN,
    HELMS,
    ROOT,
    SETS,
    as_text,
    helm,
    only,
    pods,
    refusal,
    render,
    rendered,
    values_of,
)
from tests.k8s.schemas import is_custom, kubernetes_versions, validate

EVERYTHING = (
    *("--set", "monitoring.kind=ServiceMonitor", "--set", "inferencePool.enabled=true"),
    *("--set", "inferencePool.endpointPicker.name=picker", "--set", "httpRoute.enabled=true"),
    *("--set-json", 'httpRoute.parentRefs=[{"name":"public"}]', "--set", "engines.enabled=true"),
)
"""The kinds that no example has."""


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("which", HELMS)
def test_helm_finds_nothing_to_say_about_it(which: str, name: str) -> None:
    done = helm(which, "lint", "--strict", CHART, *values_of(name))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("which", HELMS)
def test_what_is_rendered_is_what_was_reviewed(which: str, name: str) -> None:
    reviewed = (GOLDEN / f"{name}.yaml").read_text(encoding="utf-8")
    assert as_text(render(name, which=which)) == reviewed, "python -m tests.k8s.chart, and look"


@pytest.mark.parametrize("version", kubernetes_versions())
def test_every_kubernetes_knows_every_field(version: str) -> None:
    manifests = [one for name in SETS for one in rendered(name)] + render("default", *EVERYTHING)
    for manifest in manifests:
        if not is_custom(manifest):
            validate(manifest, version)


def test_versions_from_1_27_to_the_newest_are_checked() -> None:
    versions = kubernetes_versions()
    assert versions[0] == "1.27"
    assert int(versions[-1].partition(".")[2]) >= 37


def test_kinds_of_others_have_no_field_that_they_do_not_know() -> None:
    manifests = [one for name in SETS for one in rendered(name)] + render("default", *EVERYTHING)
    custom = [one for one in manifests if is_custom(one)]
    for manifest in custom:
        validate(manifest, "1.37")
    kinds = {one["kind"] for one in custom}
    assert kinds == {
        "HTTPRoute",
        "InferencePool",
        "PodMonitor",
        "PrometheusRule",
        "ServiceMonitor",
    }


@pytest.mark.parametrize("kind", ["HTTPRoute", "InferencePool", "PodMonitor", "ServiceMonitor"])
def test_a_field_that_its_kind_does_not_know_is_found(kind: str) -> None:
    manifests = [*render("default", *EVERYTHING), *rendered("production")]
    [manifest, *_] = [one for one in manifests if one["kind"] == kind]
    wrong = {**manifest, "spec": {**manifest["spec"], "timeout": "0s"}}
    with pytest.raises(jsonschema.ValidationError, match="timeout"):
        validate(wrong, "1.37")


TYPOS = [
    ("replica=2", "replica"),
    ("router.replica=2", "replica"),
    ("router.replicas=two", "/router/replicas"),
    ("router.resources.request.cpu=1", "request"),
    ("router.shutdownTimeout=5m", "/router/shutdownTimeout"),
    ("settings.max-conections=1", "max-conections"),
    ("settings.log-level=loud", "/settings/log-level"),
    ("settings.max-body-size=much", "/settings/max-body-size"),
    ("settings.port=9000", "port"),
    ("settings.ui=true", "ui"),
    ("settings.conversation-store-password=hunter2", "conversation-store-password"),
    ("discovery.prefillSelector=prefill", "/discovery/prefillSelector"),
    ("discovery.port=70000", "/discovery/port"),
    ("redis.url=redis://:hunter2@redis:6379", "/redis/url"),
    ("redis.passwordSecret.nam=x", "nam"),
    ("settings.conversation-store=redis://redis", "/settings/conversation-store"),
    ("image.digest=latest", "/image/digest"),
    ("httpRoute.timeouts.requests=0s", "requests"),
    ("httpRoute.timeouts.request=15", "/httpRoute/timeouts/request"),
    ("monitoring.kind=podmonitor", "/monitoring/kind"),
    ("engines.prefil.replicas=2", "prefil"),
    ("engines.prefill.replica=2", "replica"),
    ("engines.connector=NixlConnector", "/engines/connector"),
    ("autoscaling.enabled=yes", "/autoscaling/enabled"),
]


@pytest.mark.parametrize(("typo", "named"), TYPOS)
@pytest.mark.parametrize("which", HELMS)
def test_a_typo_is_refused_by_name(which: str, typo: str, named: str) -> None:
    assert named in refusal("--set", typo, which=which)


SECTIONS = sorted(yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8")))


@pytest.mark.parametrize("section", [*SECTIONS, "router.resources", "engines.prefill.resources"])
def test_what_is_taken_away_is_missed_by_name(section: str) -> None:
    """Helm takes null for a wish to have none of it."""
    said = refusal("--set", f"{section}=null")
    assert f"missing property '{section.rpartition('.')[2]}'" in said


def test_a_service_whose_name_begins_with_a_digit_is_refused() -> None:
    assert "begin with a letter" in refusal("--set-string", "fullnameOverride=1e3")


def test_names_that_look_like_numbers_stay_text() -> None:
    numbers = [
        f"{name}={number}"
        for number, name in enumerate(
            [
                "nameOverride",
                "engines.group",
                "engines.servedModelName",
                "engines.sideChannelSecret.name",
                "engines.modelVolume.claim",
                "discovery.namespace",
                "redis.passwordSecret.name",
                "serviceAccount.name",
                "router.priorityClassName",
            ]
        )
    ]
    for manifest in render("engines", "--set-string", ",".join(numbers)):
        validate(manifest, "1.37")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("router.enabled=false", "nothing to install"),
        ("router.livenessPort=8000", "must differ"),
        ("router.metricsPort=8001", "must differ"),
        ("discovery.enabled=false", "names no engines"),
        ("settings.workers=2", "settings.workers above 1"),
        ("redis.url=redis://r,settings.conversation-store=off", "both set"),
        ("admin.enabled=true", "admin.tokenSecret.name"),
        ("admin.enabled=true,admin.tokenSecret.name=a,admin.port=8001", "must differ"),
        ("ui.enabled=true", "ui.tokenSecret.name"),
        ("httpRoute.enabled=true", "httpRoute.parentRefs"),
        ("inferencePool.enabled=true", "inferencePool.endpointPicker.name"),
        ("autoscaling.enabled=true,autoscaling.minReplicas=11", "minReplicas is more"),
        ("autoscaling.enabled=true,autoscaling.targetCPU=0", "targetCPU or"),
        (
            "engines.enabled=true,engines.decode.maxReplicas=4,engines.decode.replicas=5",
            "replicas from",
        ),
        ("engines.decode.maxReplicas=4", "maxReplicas needs engines.enabled"),
        ("engines.enabled=true,engines.both.maxReplicas=4", "replicas from"),
        ("engines.enabled=true,engines.ucxPorts.last=1", "ucxPorts.first"),
    ],
)
def test_values_that_cannot_work_together_are_refused_in_a_line(values: str, said: str) -> None:
    assert said in refusal("--set", values)


def test_an_old_kubernetes_is_refused() -> None:
    assert "kubeVersion" in refusal("--kube-version", "1.26.0")


def test_one_pool_is_scaled_by_what_the_router_measures() -> None:
    wanted = ("--set", "engines.decode.maxReplicas=8,engines.group=blue")
    manifests = render("engines", *wanted)
    scaler = only(manifests, "HorizontalPodAutoscaler")
    target = scaler["spec"]["scaleTargetRef"]["name"]
    replicas = {
        one["metadata"]["name"]: one["spec"].get("replicas")
        for one in manifests
        if one["kind"] == "Deployment"
    }
    assert replicas == {"r-disagg-router": 1, "r-disagg-router-prefill": 2, target: None}
    [source] = scaler["spec"]["metrics"]
    metric = source["external"]["metric"]
    described = {one.name: one for one in Metrics().described}[metric["name"]]
    assert metric["selector"]["matchLabels"] == {"group": "blue", "role": EngineRole.DECODE}
    assert set(described.labels) == set(metric["selector"]["matchLabels"])
    for version in kubernetes_versions():
        validate(scaler, version)
    assert metric["name"] in (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")


def test_a_pool_of_both_roles_takes_the_place_of_the_others_and_scales_by_the_sum() -> None:
    manifests = render("both-roles")
    names = {one["metadata"]["name"] for one in manifests if one["kind"] == "Deployment"}
    assert names == {"r-disagg-router", "r-disagg-router-both"}
    [metric] = only(manifests, "HorizontalPodAutoscaler")["spec"]["metrics"]
    assert metric["external"]["metric"]["selector"]["matchLabels"] == {"group": "blue"}
    bare = render("both-roles", "--set", "engines.group=")
    [metric] = only(bare, "HorizontalPodAutoscaler")["spec"]["metrics"]
    assert "selector" not in metric["external"]["metric"]


def test_the_router_takes_the_pods_of_that_pool_for_engines_of_both_roles() -> None:
    [template] = [
        one["spec"]["template"]
        for one in rendered("both-roles")
        if one["metadata"]["name"] == "r-disagg-router-both" and one["kind"] == "Deployment"
    ]
    ready = {"podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
    pod = msgspec.convert({**template, "status": ready}, Pod)
    engine = read_pod(pod, EngineRole.DECODE, "http").listed
    assert engine is not None
    assert engine.role is EngineRole.BOTH
    arguments = template["spec"]["containers"][0]["args"]
    config = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    assert config["kv_connector_extra_config"]["target_itl_ms"] == 50


def test_engines_alone_bring_nothing_of_the_router() -> None:
    manifests = render("engines", "--set", "router.enabled=false")
    kinds = sorted(one["kind"] for one in manifests)
    assert kinds == ["Deployment", "Deployment", "NetworkPolicy", "PodMonitor"]


def test_long_names_stay_legal() -> None:
    release = "a" * 53  # the longest that Helm takes
    manifests = render("engines", release=release)
    names = [(one["kind"], one["metadata"]["name"]) for one in manifests]
    assert max(len(name) for _, name in names) <= 63
    assert len(set(names)) == len(names)


def test_two_releases_in_a_namespace_share_no_name() -> None:
    one, two = (render("production", release=name) for name in ("one", "two"))
    names = [{(m["kind"], m["metadata"]["name"]) for m in each} for each in (one, two)]
    assert not names[0] & names[1]


def test_the_route_goes_to_the_pool_where_there_is_one() -> None:
    manifests = render("default", *EVERYTHING)
    [backend] = only(manifests, "HTTPRoute")["spec"]["rules"][0]["backendRefs"]
    pool = only(manifests, "InferencePool")
    assert (backend["kind"], backend["name"]) == ("InferencePool", pool["metadata"]["name"])


def test_a_stream_may_take_as_long_as_it_takes() -> None:
    [rule] = only(rendered("production"), "HTTPRoute")["spec"]["rules"]
    assert rule["timeouts"] == {"request": "0s", "backendRequest": "0s"}


def test_every_port_says_its_protocol() -> None:
    """Helm 4 applies on the server, where an old one takes it for a part of the port's key."""
    for name in SETS:
        for manifest in rendered(name):
            assert all("protocol" in port for port in _ports(manifest)), manifest["metadata"]


def _ports(node: object) -> list[dict[str, object]]:
    if isinstance(node, list):
        return [port for one in node for port in _ports(one)]
    if not isinstance(node, dict):
        return []
    own = [one for one in node.get("ports", []) if isinstance(one, dict)]
    return own + [port for one in node.values() for port in _ports(one)]


def test_the_notes_have_a_line_of_curl() -> None:
    # Helm 3 asks a cluster even then.
    done = helm("helm4", "install", "r", CHART, "--dry-run=client", "--namespace", "here")
    assert done.returncode == 0, done.stderr
    _, notes = done.stdout.split("NOTES:")
    assert "curl http://localhost:8000/v1/chat/completions" in notes
    assert "port-forward service/r-disagg-router 8000:80" in notes
    assert "disagg-router doctor http://localhost:8000" in notes


def test_golden_files_are_of_the_sets_that_are_rendered() -> None:
    assert {path.stem for path in Path(GOLDEN).iterdir()} == set(SETS)


@pytest.mark.parametrize(
    ("values", "made", "mounted"),
    [
        ("sideChannelSecret.create=true", True, "r-disagg-router-side-channel"),
        ("sideChannelSecret.name=mine", False, "mine"),
        ("sideChannelSecret.create=false", False, None),
    ],
)
def test_engines_share_a_secret_that_the_chart_makes_unless_one_is_named(
    values: str, made: bool, mounted: str | None
) -> None:
    manifests = render("demo", "--set", f"engines.{values}")
    secrets = [one["metadata"]["name"] for one in manifests if one["kind"] == "Secret"]
    assert secrets == (["r-disagg-router-side-channel"] if made else [])
    for role in ("prefill", "decode"):
        pod = dict(pods(manifests))[f"r-disagg-router-{role}"]
        volumes = [one["secret"]["secretName"] for one in pod["volumes"] if "secret" in one]
        assert volumes == ([mounted] if mounted else [])
        is_used = "side_channel_secret_file" in str(pod["containers"][0]["args"])
        assert is_used == (mounted is not None)


def test_keys_and_certificates_are_files_that_follow_their_secrets() -> None:
    given = "keys.fileSecret.name=k,keys.engineKeySecret.name=e,tls.secret=t"
    manifests = render("default", "--set", given)
    config = yaml.safe_load(only(manifests, "ConfigMap")["data"]["config.yaml"])
    at = "/etc/disagg-router/secrets"
    assert config["api-keys-file"] == f"{at}/api-keys"
    assert config["engine-api-key-file"] == f"{at}/engine-key"
    assert (config["tls-certfile"], config["tls-keyfile"]) == (f"{at}/tls.crt", f"{at}/tls.key")
    pod = only(manifests, "Deployment")["spec"]["template"]["spec"]
    [volume] = [one for one in pod["volumes"] if one["name"] == "secrets"]
    files = {
        source["secret"]["items"][0]["path"]: source["secret"]["name"]
        for source in volume["projected"]["sources"]
    }
    assert files == {"api-keys": "k", "engine-key": "e", "tls.crt": "t", "tls.key": "t"}
    [container] = pod["containers"]
    # A file under a subPath would never follow its Secret.
    assert not any("subPath" in mount for mount in container["volumeMounts"])
    assert container["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    assert "scheme" not in container["livenessProbe"]["httpGet"]
    [port] = only(manifests, "Service")["spec"]["ports"]
    assert port["appProtocol"] == "https"
