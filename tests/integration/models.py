"""The tests' models, besides the one that all have in common."""

import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def another_version(model: Path, folder: Path) -> Path:
    """The same weights, and a file beside them that nobody reads."""
    shutil.copytree(model, folder)
    save_file({"version": np.full(1, 2, np.float32)}, folder / "version.safetensors")
    return folder
