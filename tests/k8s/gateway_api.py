"""The Gateway API and EndpointSlices in a cluster that is too old to have them.

As CRDs without a schema: what goes in here is made by these tests, and a newer Gateway writes more
into statuses than any one schema knows. EndpointSlices are written by `publish`, as their
controller would.
"""

from typing import Any

import httpx

from tests.k8s.cluster import Cluster, Manifest, wait_for
from tests.k8s.pods import Pods

GROUP = "gateway.networking.k8s.io"
SLICES = "discovery.k8s.io"
CONTROLLER = "traefik.io/gateway-controller"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
OPEN = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
KINDS = (
    ("GatewayClass", "gatewayclasses", GROUP, "v1", "Cluster"),
    ("Gateway", "gateways", GROUP, "v1", "Namespaced"),
    ("HTTPRoute", "httproutes", GROUP, "v1", "Namespaced"),
    # Watched by Gateways, whether used or not.
    ("GRPCRoute", "grpcroutes", GROUP, "v1", "Namespaced"),
    ("TLSRoute", "tlsroutes", GROUP, "v1", "Namespaced"),
    ("ReferenceGrant", "referencegrants", GROUP, "v1beta1", "Namespaced"),
    ("BackendTLSPolicy", "backendtlspolicies", GROUP, "v1", "Namespaced"),
    ("EndpointSlice", "endpointslices", SLICES, "v1", "Namespaced"),
)


def install(cluster: Cluster) -> None:
    for kind, plural, group, version, scope in KINDS:
        cluster.create(CRDS, _definition(kind, plural, group, version, scope))
    for _, plural, group, version, _ in KINDS:
        path = f"/apis/{group}/{version}/{plural}"
        wait_for(f"{plural} served", lambda path=path: _is_served(cluster, path))  # type: ignore[misc]


def _is_served(cluster: Cluster, path: str) -> bool:
    try:
        cluster.get(path)
    except httpx.HTTPStatusError:
        return False
    return True


def _definition(kind: str, plural: str, group: str, version: str, scope: str) -> Manifest:
    served: Manifest = {
        "name": version,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": OPEN},
    }
    if group == GROUP:
        served["subresources"] = {"status": {}}
    names = {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower()}
    approved = {"api-approved.kubernetes.io": "unapproved, for tests"}
    return {
        "metadata": {"name": f"{plural}.{group}", "annotations": approved},
        "spec": {"group": group, "names": names, "scope": scope, "versions": [served]},
    }


def create_gateway(cluster: Cluster, namespace: str, port: int) -> None:
    """Of the class "traefik", which is made where it is missing."""
    classes = f"/apis/{GROUP}/v1/gatewayclasses"
    if not cluster.get(classes)["items"]:
        cluster.create(classes, _object("GatewayClass", "traefik", {"controllerName": CONTROLLER}))
    listener = {"name": "web", "port": port, "protocol": "HTTP"}
    spec = {"gatewayClassName": "traefik", "listeners": [listener]}
    cluster.create(_path(namespace, "gateways"), _object("Gateway", "public", spec))


def create_route(
    cluster: Cluster, namespace: str, service: str, port: int, **timeouts: str
) -> None:
    """All that comes to the Gateway, to that Service."""
    rule = {
        # Said although it is the default: defaults are what the schema has that is missing here.
        "matches": [{"path": {"type": "PathPrefix", "value": "/"}}],
        "backendRefs": [{"name": service, "port": port}],
        "timeouts": timeouts,
    }
    spec = {"parentRefs": [{"name": "public"}], "rules": [rule]}
    cluster.create(_path(namespace, "httproutes"), _object("HTTPRoute", service, spec))


def conditions(cluster: Cluster, namespace: str, route: str) -> dict[str, str]:
    """What its Gateway says of a route."""
    found = cluster.get(f"{_path(namespace, 'httproutes')}/{route}")
    parents = found.get("status", {}).get("parents", [])
    return {one["type"]: one["status"] for parent in parents for one in parent["conditions"]}


def publish(pods: Pods, service: str, port: int, selector: str) -> None:
    """The Service's EndpointSlice, as its pods are now."""
    cluster, namespace = pods.cluster, pods.namespace
    content = {
        "metadata": {"name": service, "labels": {"kubernetes.io/service-name": service}},
        "apiVersion": f"{SLICES}/v1",
        "kind": "EndpointSlice",
        "addressType": "IPv4",
        "endpoints": [
            _endpoint(pod) for pod in pods.all(selector).values() if "podIP" in pod["status"]
        ],
        "ports": [{"name": "http", "port": port, "protocol": "TCP"}],
    }
    path = f"/apis/{SLICES}/v1/namespaces/{namespace}/endpointslices"
    try:
        cluster.merge(f"{path}/{service}", content)
    except httpx.HTTPStatusError:
        cluster.create(path, content)


def _endpoint(pod: Manifest) -> Manifest:
    is_ready = any(
        one["type"] == "Ready" and one["status"] == "True" for one in pod["status"]["conditions"]
    )
    is_going = "deletionTimestamp" in pod["metadata"]
    said = {"ready": is_ready and not is_going, "serving": is_ready, "terminating": is_going}
    return {"addresses": [pod["status"]["podIP"]], "conditions": said}


def _object(kind: str, name: str, spec: dict[str, Any]) -> Manifest:
    return {
        "apiVersion": f"{GROUP}/v1",
        "kind": kind,
        "metadata": {"name": name},
        "spec": spec,
    }


def _path(namespace: str, plural: str) -> str:
    return f"/apis/{GROUP}/v1/namespaces/{namespace}/{plural}"
