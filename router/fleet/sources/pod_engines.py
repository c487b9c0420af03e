"""Reads pods as engines. Pure; only the needed fields of a pod are parsed."""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from router.fleet.engine_spec import DEFAULT_GROUP, EngineRole, EngineSpec, Intent, ListedEngine
from router.fleet.sources.source import SourceError
from router.settings import MAX_GROUP_WEIGHT, Address, canonical, is_port

# Labels and annotations of a pod that describe its engine; annotations take precedence.
PREFIX = "disagg-router.io/"
LLM_D_ROLE = "llm-d.ai/role"
ROLES = {
    "prefill": EngineRole.PREFILL,
    "decode": EngineRole.DECODE,
    "both": EngineRole.BOTH,
    "prefill-decode": EngineRole.BOTH,
}
ENDED_PHASES = ("Succeeded", "Failed")


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
    """`listed` is None for a pod that is not an engine now; `problem` is why, if it should be."""

    listed: ListedEngine | None
    problem: str = ""


def read_pod(pod: Pod, role: EngineRole, port: str, scheme: str = "http") -> PodEngine:
    """Return the engine of a pod. `role`, `port` and `scheme` are the defaults for pods without
    labels or annotations."""
    intent = _intent(pod)
    if intent is None:
        return PodEngine(None)
    try:
        return PodEngine(ListedEngine(_spec(pod, role, port, scheme), intent))
    except (SourceError, ValueError) as error:
        return PodEngine(None, f"pod {pod.metadata.name[:253]}: {error}")


def _intent(pod: Pod) -> Intent | None:
    """Return None for a pod that has not started or has ended. A pod that is being deleted may have
    legs to finish, whether it is still ready or not."""
    if pod.status.phase in ENDED_PHASES or not pod.status.pod_ip:
        return None
    if pod.metadata.deletion_timestamp:
        return Intent.DRAINING
    conditions = pod.status.conditions or ()
    is_ready = any(one.type == "Ready" and one.status == "True" for one in conditions)
    return Intent.SERVING if is_ready else None


def _spec(pod: Pod, role: EngineRole, port: str, scheme: str) -> EngineSpec:
    """Raises SourceError, ValueError."""
    port_number = _port(pod, _annotation(pod, "port") or port)
    address = Address(canonical(pod.status.pod_ip or ""), port_number)
    models = frozenset((_annotation(pod, "models") or "").replace(",", " ").split())
    group = _annotation(pod, "group") or DEFAULT_GROUP
    tls = _is_tls(_annotation(pod, "scheme") or scheme)
    return EngineSpec(_role(pod, role), address, models, group, _weight(pod), tls)


def _is_tls(scheme: str) -> bool:
    """Raises SourceError: a misspelt scheme must not mean plain HTTP."""
    if scheme not in ("http", "https"):
        raise SourceError(f"{PREFIX}scheme is {scheme[:64]!r}, not http or https")
    return scheme == "https"


def _annotation(pod: Pod, what: str) -> str | None:
    for given in (pod.metadata.annotations, pod.metadata.labels):
        if given and PREFIX + what in given:
            return given[PREFIX + what]
    return None


def _role(pod: Pod, role: EngineRole) -> EngineRole:
    """Return the default role for a role of llm-d that is not ours. Raises SourceError."""
    given = _annotation(pod, "role")
    if given is None:
        return ROLES.get((pod.metadata.labels or {}).get(LLM_D_ROLE, ""), role)
    if given not in ROLES:
        raise SourceError(f"{PREFIX}role is {given[:64]!r}, not prefill, decode or both")
    return ROLES[given]


def _weight(pod: Pod) -> float:
    """Raises SourceError."""
    given = _annotation(pod, "weight")
    try:
        weight = 1.0 if given is None else float(given)
    except ValueError:
        weight = math.nan
    if not 0 <= weight <= MAX_GROUP_WEIGHT:
        raise SourceError(f"{PREFIX}weight is {str(given)[:64]!r}, not a number from 0 to 1e6")
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
