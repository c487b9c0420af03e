"""Which pods are engines, and what they say of themselves."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from router.fleet.engine import EngineRole, EngineSpec, Intent
from router.fleet.sources.kubernetes import PodEngine, distinct, read_pod
from router.fleet.sources.pod_api import Pod
from router.settings import Address
from tests.unit.router.fleet.sources.api_server import pod


def look(
    made: dict[str, Any], role: EngineRole = EngineRole.DECODE, port: str = "8000"
) -> PodEngine:
    return read_pod(msgspec.json.decode(msgspec.json.encode(made), type=Pod), role, port)


def spec(made: dict[str, Any], port: str = "8000") -> EngineSpec:
    found = look(made, port=port)
    assert found.listed is not None, found.problem
    return found.listed


@pytest.mark.parametrize(
    ("how", "intent"),
    [
        ({}, Intent.SERVING),
        ({"ready": False}, None),
        ({"ip": None}, None),
        ({"ip": ""}, None),
        ({"terminating": True}, Intent.DRAINING),
        ({"terminating": True, "ready": False}, Intent.DRAINING),
        ({"terminating": True, "ip": None}, None),
        ({"phase": "Succeeded"}, None),
        ({"phase": "Failed", "terminating": True}, None),
    ],
)
def test_ready_pods_serve_and_those_that_end_drain(
    how: dict[str, Any], intent: Intent | None
) -> None:
    found = look(pod("d", **how))
    assert found.problem == ""
    assert (found.listed and found.listed.intent) == intent


def test_a_pod_may_lack_nearly_everything() -> None:
    assert look({"metadata": {}}) == PodEngine(None)
    assert look({"metadata": {"labels": None}, "spec": {"containers": None}}) == PodEngine(None)


@pytest.mark.parametrize(
    ("labels", "role"),
    [
        ({}, EngineRole.DECODE),
        ({"llm-d.ai/role": "prefill"}, EngineRole.PREFILL),
        ({"llm-d.ai/role": "both"}, EngineRole.BOTH),
        ({"llm-d.ai/role": "prefill-decode"}, EngineRole.BOTH),
        ({"llm-d.ai/role": "encode"}, EngineRole.DECODE),
        ({"llm-d.ai/role": "prefill", "disagg-router.io/role": "decode"}, EngineRole.DECODE),
    ],
)
def test_a_pods_role_is_read(labels: dict[str, str], role: EngineRole) -> None:
    assert spec(pod("d", labels=labels)).role is role


def test_annotations_take_precedence_over_labels() -> None:
    made = pod(
        "d",
        labels={"disagg-router.io/group": "blue", "disagg-router.io/weight": "2.5"},
        annotations={
            "disagg-router.io/models": "org/m, n",
            "disagg-router.io/group": "green",
            "disagg-router.io/port": "9000",
        },
    )
    address, models = Address("10.0.0.1", 9000), frozenset(["org/m", "n"])
    assert spec(made) == EngineSpec(EngineRole.DECODE, address, models, "green", 2.5)


def test_a_port_is_a_number_or_a_container_ports_name() -> None:
    made = pod("d", ports={"metrics": 9090, "http": 8200})
    assert spec(made, "http").address.port == 8200
    assert spec(made, "8000").address.port == 8000
    sidecar = pod("d")
    sidecar["spec"]["initContainers"] = [{"ports": [{"name": "http", "containerPort": 1}]}]
    assert spec(sidecar, "http").address.port == 1
    assert spec(pod("d", ip="fd00:0::1")).name == "[fd00::1]:8000"


@pytest.mark.parametrize(
    ("how", "complaint"),
    [
        ({"annotations": {"disagg-router.io/role": "decoder"}}, "role is 'decoder'"),
        ({"annotations": {"disagg-router.io/weight": "x"}}, "weight is 'x'"),
        ({"annotations": {"disagg-router.io/weight": "nan"}}, "weight is 'nan'"),
        ({"annotations": {"disagg-router.io/weight": "-1"}}, "weight is '-1'"),
        ({"annotations": {"disagg-router.io/port": "web"}}, "has no port 'web'"),
        ({"annotations": {"disagg-router.io/port": "70000"}}, "has no port '70000'"),
        ({"annotations": {"disagg-router.io/port": "\u0663"}}, "has no port"),
        ({"ip": "1::2::3"}, "1::2::3"),
    ],
)
def test_an_invalid_pod_is_a_problem_and_no_engine(how: dict[str, Any], complaint: str) -> None:
    found = look(pod("d1", **how))
    assert found.listed is None
    assert found.problem.startswith("pod d1: ")
    assert complaint in found.problem


def test_the_serving_pod_of_two_at_one_address_counts() -> None:
    at = EngineSpec(EngineRole.DECODE, Address("h", 1))
    old, new = replace(at, intent=Intent.DRAINING), at
    assert distinct([old, new]) == distinct([new, old]) == (new,)
    assert distinct([old, old]) == (old,)


@pytest.mark.parametrize(
    ("labels", "scheme", "tls"),
    [
        ({}, "http", False),
        ({}, "https", True),
        ({"disagg-router.io/scheme": "https"}, "http", True),
        ({"disagg-router.io/scheme": "http"}, "https", False),
    ],
)
def test_a_pods_scheme_overrides_the_default(
    labels: dict[str, str], scheme: str, tls: bool
) -> None:
    made = msgspec.json.decode(msgspec.json.encode(pod("d", labels=labels)), type=Pod)
    found = read_pod(made, EngineRole.DECODE, "8000", scheme)
    assert found.listed is not None
    assert found.listed.tls is tls


def test_a_misspelt_scheme_is_a_problem_and_not_plain_http() -> None:
    found = look(pod("d", labels={"disagg-router.io/scheme": "htps"}))
    assert found.listed is None
    assert "scheme is 'htps'" in found.problem
