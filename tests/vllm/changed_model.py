"""The tiny model as one of another architecture: its weights made into others, its config too."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.numpy import load, save

from engine_ext.reference.tiny_model import TinyModel, Weights, write_tiny_model


def write_changed_model(
    directory: Path,
    model: TinyModel,
    config: dict[str, Any],
    change: Callable[[Weights], Weights] = lambda weights: weights,
) -> Path:
    """`config` stands over the tiny model's own. Returns `directory`."""
    write_tiny_model(directory, model)
    weights = directory / "model.safetensors"
    weights.write_bytes(save(change(load(weights.read_bytes())), {"format": "pt"}))
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return directory
