"""Where scripts/install_k8s and scripts/install_helm put what the tests run."""

import os
from pathlib import Path

CACHES = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
CACHE = Path(os.environ.get("DISAGG_K8S") or CACHES / "disagg-router" / "k8s")


def kube(name: str) -> str:
    return _found(CACHE / "kube" / name)


def gateway(name: str) -> str:
    return _found(CACHE / "gateways" / f"{name}.bin")


def _found(path: Path) -> str:
    """A test without it fails: these are run only by those who want them."""
    assert path.exists(), f"{path} is missing: run scripts/install_k8s"
    return str(path)
