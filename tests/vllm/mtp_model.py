"""A tiny DeepSeek-V3 with a module for multi-token prediction (MTP) that guesses well.

The module is DeepSeek's: of the next token's embedding and the hidden state before it, of which
this one leaves the state alone, one layer more. It is the model's first layer again, and what the
model's second adds is made small, so that most guesses are right, and not all.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from engine_ext.reference.tiny_model import Weights
from tests.vllm.changed_model import write_changed_model
from tests.vllm.mla_model import DEEPSEEK, MODEL

TWO_LAYERS = replace(MODEL, layers=2)
CONFIG = DEEPSEEK | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": TWO_LAYERS.layers + 1,
}
MODULE = f"model.layers.{TWO_LAYERS.layers}."
SMALL = 0.1


def write_mtp_model(directory: Path, *, guesses_well: bool = True) -> Path:
    """Of two that differ in `guesses_well` alone, the answers are the same, and the module's keys
    and values are not."""
    change = partial(_with_module, "0" if guesses_well else "1")
    return write_changed_model(directory, TWO_LAYERS, CONFIG, change)


def _with_module(guesses_as: str, weights: Weights) -> Weights:
    """A module like that layer of the model's."""
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"model.layers.1.{name}.weight"] *= SMALL
    layer = f"model.layers.{guesses_as}."
    parts = {name.removeprefix(layer): weights[name] for name in weights if layer in name}
    embeddings, norm = weights["model.embed_tokens.weight"], weights["model.norm.weight"]
    as_embedded = np.sqrt((embeddings**2).mean())
    module = {
        **parts,
        "embed_tokens.weight": embeddings,
        "enorm.weight": np.full_like(norm, as_embedded),
        "hnorm.weight": np.ones_like(norm),
        "eh_proj.weight": np.eye(len(norm), 2 * len(norm), dtype=np.float32),
        "shared_head.norm.weight": norm,
        "shared_head.head.weight": weights["lm_head.weight"],
    }
    return weights | {MODULE + name: weight for name, weight in module.items()}
