"""What manifests must look like: Kubernetes' kinds by kubernetes-validate, others by their CRDs.

An API server drops a field that it does not know, without a word; here it is a failure.
"""

import copy
import json
import re
import tarfile
from functools import cache
from importlib.resources import files
from typing import Any

import jsonschema
import kubernetes_validate

from tests.k8s.binaries import CACHE
from tests.k8s.chart import Manifest

OLDEST = (1, 27)
PACKAGES = {
    "gateway.networking.k8s.io": "gateway-api.tgz",
    "monitoring.coreos.com": "prometheus-operator.tgz",
}
LABELS = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}
PORT = {
    "type": "object",
    "required": ["number"],
    "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 65535}},
}
# No package carries this one: the fields of v1 that we use, and what its reference says of them.
INFERENCE_POOL: dict[str, Any] = {
    "type": "object",
    "required": ["spec"],
    "properties": {
        "apiVersion": {"const": "inference.networking.k8s.io/v1"},
        "kind": {"const": "InferencePool"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "required": ["selector", "targetPorts"],
            "properties": {
                "selector": {
                    "type": "object",
                    "required": ["matchLabels"],
                    "properties": {"matchLabels": LABELS},
                },
                "targetPorts": {"type": "array", "items": PORT, "minItems": 1, "maxItems": 8},
                "endpointPickerRef": {
                    "type": "object",
                    "required": ["name", "port"],
                    "properties": {
                        "group": {"type": "string"},
                        "kind": {"type": "string"},
                        "name": {"type": "string", "minLength": 1},
                        "port": PORT,
                        "failureMode": {"enum": ["FailOpen", "FailClose"]},
                    },
                },
            },
        },
    },
}


def kubernetes_versions() -> list[str]:
    """Those that kubernetes-validate carries, from the oldest that the chart admits."""
    carried = files(kubernetes_validate) / "kubernetes-json-schema"
    found = (re.fullmatch(r"v(\d+)\.(\d+)\.0-local-strict", one.name) for one in carried.iterdir())
    versions = sorted((int(one[1]), int(one[2])) for one in found if one)
    return [f"{major}.{minor}" for major, minor in versions if (major, minor) >= OLDEST]


def is_custom(manifest: Manifest) -> bool:
    group = manifest["apiVersion"].partition("/")[0]
    return group in PACKAGES or group == "inference.networking.k8s.io"


def validate(manifest: Manifest, version: str) -> None:
    """Raises jsonschema's ValidationError, of which kubernetes-validate's is one."""
    if is_custom(manifest):
        jsonschema.validate(manifest, custom_schema(manifest["apiVersion"], manifest["kind"]))
    else:
        kubernetes_validate.validate(manifest, version, strict=True)


@cache
def custom_schema(api_version: str, kind: str) -> dict[str, Any]:
    group, _, version = api_version.partition("/")
    if kind == "InferencePool":
        return closed(INFERENCE_POOL)
    with tarfile.open(CACHE / "schemas" / PACKAGES[group]) as tar:
        module = tar.extractfile(f"package/{group}/{version}/{kind}.js")
        assert module is not None
        found = re.search(rb"const schema = (\{.*?\n\});", module.read(), re.DOTALL)
    assert found is not None
    schema: dict[str, Any] = json.loads(found[1])
    schema["properties"]["metadata"] = {"type": "object"}  # else a reference to another package
    return closed(schema)


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, refusing what it does not know."""
    schema = copy.deepcopy(schema)
    _close(schema)
    return schema


def _close(node: Any) -> None:
    if isinstance(node, list):
        for one in node:
            _close(one)
    elif isinstance(node, dict):
        if node.pop("nullable", False) and "type" in node:  # OpenAPI's word, not JSON schema's
            node["type"] = [node["type"], "null"]
        if isinstance(node.get("properties"), dict):
            node.setdefault("additionalProperties", False)
        for one in node.values():
            _close(one)
