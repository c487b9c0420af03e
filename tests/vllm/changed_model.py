"""The tiny model as one of another architecture: its weights made into others, its config too."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from engine_ext.reference.tiny_model import TinyModel, Weights, write_tiny_model


def normal(random: np.random.Generator) -> Callable[..., Any]:
    """Draws weights of the shape it is given; `scale` is their deviation, 0.1 by default."""

    def drawn(*shape: int, scale: float = 0.1) -> Any:
        return random.normal(0, scale, shape).astype(np.float32)

    return drawn


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
