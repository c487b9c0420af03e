"""Pods as engines: pure. Of a pod only what is needed is read, whatever else it holds."""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from router.fleet.engine_spec import DEFAULT_GROUP, EngineRole, EngineSpec, Intent, ListedEngine
from router.fleet.sources.source import SourceError
from router.settings import MAX_GROUP_WEIGHT, Address, canonical, is_port

# What a pod may say of itself, as a label or, before that, as an annotation.
OURS = "disagg-router.io/"
THEIRS = "llm-d.ai/role"
ROLES = {
    "prefill": EngineRole.PREFILL,
    "decode": EngineRole.DECODE,
    "both": EngineRole.BOTH,
    "prefill-decode": EngineRole.BOTH,
}
OVER = ("Succeeded", "Failed")


class PodMetadata(msgspec.Struct, rename="camel"):
    name: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class ContainerPort(msgspec.Struct, rename="camel"):
    container_port: int = 0
    name: str = ""


class PodContainer(msgspec.Struct):
    ports: list[ContainerPort] | None = None


class PodSpec(msgspec.Struct, rename="camel"):
    containers: list[PodContainer] | None = None
    init_containers: list[PodContainer] | None = None


class PodCondition(msgspec.Struct):
    type: str = ""
    status: str = ""


class PodStatus(msgspec.Struct):
    phase: str = ""
    pod_ip: str | None = msgspec.field(default=None, name="podIP")
    conditions: list[PodCondition] | None = None


class Pod(msgspec.Struct):
    metadata: PodMetadata
    spec: PodSpec = msgspec.field(default_factory=PodSpec)
    status: PodStatus = msgspec.field(default_factory=PodStatus)


class PodEngine(NamedTuple):
    """`listed` is None for a pod that is no engine now; `trouble` is why, where it should be."""

    listed: ListedEngine | None
    problem: str = ""


def read_pod(pod: Pod, role: EngineRole, port: str, scheme: str = "http") -> PodEngine:
    """`role`, `port` and `scheme` are those of pods that do not say otherwise."""
    intent = _intent(pod)
    if intent is None:
        return PodEngine(None)
    try:
        return PodEngine(ListedEngine(_spec(pod, role, port, scheme), intent))
    except (SourceError, ValueError) as error:
        return PodEngine(None, f"pod {pod.metadata.name[:253]}: {error}")


def _intent(pod: Pod) -> Intent | None:
    """None for a pod that is not there yet, or not any more. One that is told to end may have legs
    to finish, whether it still calls itself ready or not."""
    if pod.status.phase in OVER or not pod.status.pod_ip:
        return None
    if pod.metadata.deletion_timestamp:
        return Intent.DRAINING
    conditions = pod.status.conditions or ()
    is_ready = any(one.type == "Ready" and one.status == "True" for one in conditions)
    return Intent.SERVING if is_ready else None


def _spec(pod: Pod, role: EngineRole, port: str, scheme: str) -> EngineSpec:
    """Raises SourceError, ValueError."""
    address = Address(canonical(pod.status.pod_ip or ""), _port(pod, _says(pod, "port") or port))
    models = frozenset((_says(pod, "models") or "").replace(",", " ").split())
    group = _says(pod, "group") or DEFAULT_GROUP
    tls = _is_tls(_says(pod, "scheme") or scheme)
    return EngineSpec(_role(pod, role), address, models, group, _weight(pod), tls)


def _is_tls(scheme: str) -> bool:
    """Raises SourceError: what is misspelt is not spoken to in plain."""
    if scheme not in ("http", "https"):
        raise SourceError(f"{OURS}scheme is {scheme[:64]!r}, not http or https")
    return scheme == "https"


def _says(pod: Pod, what: str) -> str | None:
    for said in (pod.metadata.annotations, pod.metadata.labels):
        if said and OURS + what in said:
            return said[OURS + what]
    return None


def _role(pod: Pod, role: EngineRole) -> EngineRole:
    """A role of llm-d that is none of ours leaves it to the selector. Raises SourceError."""
    ours = _says(pod, "role")
    if ours is None:
        return ROLES.get((pod.metadata.labels or {}).get(THEIRS, ""), role)
    if ours not in ROLES:
        raise SourceError(f"{OURS}role is {ours[:64]!r}, not prefill, decode or both")
    return ROLES[ours]


def _weight(pod: Pod) -> float:
    """Raises SourceError."""
    said = _says(pod, "weight")
    try:
        weight = 1.0 if said is None else float(said)
    except ValueError:
        weight = math.nan
    if not 0 <= weight <= MAX_GROUP_WEIGHT:
        raise SourceError(f"{OURS}weight is {str(said)[:64]!r}, not a number from 0 to 1e6")
    return weight


def _port(pod: Pod, wanted: str) -> int:
    """Raises SourceError."""
    if is_port(wanted):
        return int(wanted)
    containers: list[PodContainer] = [
        *(pod.spec.containers or ()),
        *(pod.spec.init_containers or ()),
    ]
    for container in containers:
        for port in container.ports or ():
            if port.name == wanted and 0 < port.container_port < 65536:
                return port.container_port
    raise SourceError(f"has no port {wanted[:64]!r}")
