"""An EAGLE draft model for the tiny model: that model again, nearly, so that it guesses well.

EAGLE's Llama takes the next token's embedding and the hidden state before it, of which this one
leaves the state alone; its first layer has no norm for its input, and no layer norms for queries
and keys. These are made up for by the scales that the tiny model's have on average.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def write_eagle_model(directory: Path, target: Path) -> Path:
    given = load_file(target / "model.safetensors")
    config = json.loads((target / "config.json").read_text()) | LLAMA
    embeddings = given["model.embed_tokens.weight"]
    hidden = embeddings.shape[1]
    weights = {"fc.weight": np.hstack([np.eye(hidden), np.zeros((hidden, hidden))])}
    for name, weight in given.items():
        part = name.removeprefix("model.")
        layer = part.rpartition(".self_attn.")[0]
        scale = 1.0
        if part.endswith(("q_proj.weight", "k_proj.weight")):
            norm = given[name.replace("_proj.", "_norm.")].mean()
            scale = norm / np.sqrt(hidden * (weight**2).mean())
        if layer == "layers.0" and not part.endswith(("o_proj.weight", "norm.weight")):
            scale /= np.sqrt((embeddings**2).mean())
        if part.startswith("layers.") and not part.endswith(("q_norm.weight", "k_norm.weight")):
            weights[part] = weight * scale
    del weights["layers.0.input_layernorm.weight"]
    directory.mkdir(parents=True, exist_ok=True)
    made = {name: weight.astype(np.float32) for name, weight in weights.items()}
    (directory / "model.safetensors").write_bytes(save(made, {"format": "pt"}))
    (directory / "config.json").write_text(json.dumps(config))
    return directory
