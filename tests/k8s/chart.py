"""The chart, rendered by real Helms; `python -m tests.k8s.chart` writes the golden files anew."""

import os
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.k8s.binaries import CACHE

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/disagg-router"
EXAMPLES = CHART / "examples"
GOLDEN = Path(__file__).parent / "golden"
HELMS = ("helm3", "helm4")
SETS = ("default", "production", "engines", "both-roles", "demo")
"""What is rendered: the chart as it is, and each of its examples."""

Manifest = dict[str, Any]


def helm(
    which: str, *arguments: str | Path, kubeconfig: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Helm, or kubectl; without what this user's own is set up to do, and without a cluster if none
    is named."""
    program, home = CACHE / "helm" / which, CACHE / "helm-home"
    assert program.exists(), "scripts/install_helm fetches it"
    known = kubeconfig or home / "none"
    return subprocess.run(
        [program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        env={"PATH": os.defpath, "HOME": str(home), "KUBECONFIG": str(known)},
    )


def values_of(name: str) -> list[str]:
    return [] if name == "default" else ["--values", str(EXAMPLES / f"{name}.yaml")]


def render(name: str, *more: str, which: str = "helm3", release: str = "r") -> list[Manifest]:
    done = helm(which, "template", release, CHART, "--namespace", "here", *values_of(name), *more)
    assert done.returncode == 0, done.stderr
    documents = [document for document in yaml.safe_load_all(done.stdout) if document]
    return [_without_secrets(one) if one["kind"] == "Secret" else one for one in documents]


def _without_secrets(manifest: Manifest) -> Manifest:
    """The chart makes them up anew where it is rendered without a cluster."""
    return {**manifest, "data": dict.fromkeys(manifest["data"], "bWFkZSB1cA==")}


@cache
def rendered(name: str) -> tuple[Manifest, ...]:
    return tuple(render(name))


def refusal(*more: str, which: str = "helm3") -> str:
    """What Helm says to values that it must not take."""
    done = helm(which, "template", "r", CHART, "--namespace", "here", *more)
    assert done.returncode != 0, f"Helm took {more}"
    return done.stderr


def only(manifests: list[Manifest] | tuple[Manifest, ...], kind: str) -> Manifest:
    [found] = [one for one in manifests if one["kind"] == kind]
    return found


def pods(manifests: list[Manifest] | tuple[Manifest, ...]) -> Iterator[tuple[str, Manifest]]:
    """The pod of each Deployment, with its name."""
    for one in manifests:
        if one["kind"] == "Deployment":
            yield one["metadata"]["name"], one["spec"]["template"]["spec"]


def containers(pod: Mapping[str, Any]) -> list[Manifest]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def as_text(manifests: list[Manifest]) -> str:
    """One spelling, whichever Helm wrote it; sorted, because the Helms differ in their order."""
    order = sorted(manifests, key=lambda one: (one["kind"], one["metadata"]["name"]))
    return yaml.safe_dump_all(order, sort_keys=False, width=100)


def write_golden() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for name in SETS:
        (GOLDEN / f"{name}.yaml").write_text(as_text(render(name)), encoding="utf-8")


if __name__ == "__main__":
    write_golden()
