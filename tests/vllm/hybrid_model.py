"""A tiny Gemma-3 style model: every second layer sees the last WINDOW tokens only.

The weights are those of the tiny model, whose answers depend on every token of the prompt. Gemma's
norms add one to their weights, and its embeddings are multiplied by the root of the hidden size:
both are undone here, so that attention outweighs the token that was just read. The output matrix
is one of its own: with the embeddings' a model of random weights repeats its input.
"""

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from engine_ext.reference.tiny_model import TinyModel, Weights
from tests.vllm.changed_model import write_changed_model

WINDOW = 64
NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": WINDOW,
}


def write_hybrid_model(directory: Path) -> Path:
    model = TinyModel()
    kinds = ["sliding_attention", "full_attention"] * (model.layers // 2)
    changed = {"layer_types": kinds, "query_pre_attn_scalar": model.head_dim}
    as_gemma = partial(_as_gemma, model)
    return write_changed_model(directory, model, GEMMA | changed, as_gemma)


def _as_gemma(model: TinyModel, qwen: Weights) -> Weights:
    gemma = {name: value - 1 if value.ndim == 1 else value for name, value in qwen.items()}
    gemma["model.embed_tokens.weight"] /= np.float32(math.sqrt(model.hidden))
    for layer in range(model.layers):
        for norm in NORMS:
            name = f"model.layers.{layer}.{norm}.weight"
            gemma[name] = np.zeros(model.hidden, dtype=np.float32)
    return gemma
