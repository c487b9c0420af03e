"""Plugins of vLLM's, for the servers of one test: a module here that has a `register`."""

import os
from pathlib import Path
from types import ModuleType


def write_plugin(directory: Path, module: ModuleType) -> Path:
    """A directory for PYTHONPATH in which vLLM finds the plugin."""
    name = module.__name__.rpartition(".")[2]
    metadata = directory / f"{name}-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    entry = f"[vllm.general_plugins]\n{name} = {module.__name__}:register\n"
    (metadata / "entry_points.txt").write_text(entry)
    return directory


def found_in(*directories: Path, others: str | None = None) -> dict[str, str]:
    """The environment of a server that looks into these directories before all others."""
    others = others or os.environ.get("PYTHONPATH", os.getcwd())
    return {"PYTHONPATH": os.pathsep.join([*map(str, directories), others])}
