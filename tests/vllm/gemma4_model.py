"""A tiny Gemma 4: layers with a window, and layers with full attention whose heads are larger, so
that a block of the latter has half the tokens and as many bytes."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from engine_ext.reference.tiny_model import VOCAB_SIZE, TinyModel, Weights
from tests.vllm.changed_model import normal, write_changed_model

MODEL = TinyModel(layers=6)
KINDS = ["sliding_attention", "sliding_attention", "full_attention"] * 2
WINDOW = 64
LARGE, HEADS = 64, 4
"""The size of a head of full attention, and the number of its KV heads."""
GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": WINDOW,
    "layer_types": KINDS,
    "global_head_dim": LARGE,
    "num_global_key_value_heads": HEADS,
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "enable_moe_block": False,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e6,
        },
    },
}


def write_gemma4_model(directory: Path) -> Path:
    return write_changed_model(directory, MODEL, GEMMA4, _as_gemma4)


def _as_gemma4(qwen: Weights) -> Weights:
    drawn = normal(np.random.default_rng(3))
    gemma = dict(qwen)
    gemma["model.embed_tokens.weight"] /= np.float32(math.sqrt(MODEL.hidden))
    for layer, kind in enumerate(KINDS):
        name = f"model.layers.{layer}"
        is_large = kind == "full_attention"
        size = LARGE if is_large else MODEL.head_dim
        for norm in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
            gemma[f"{name}.{norm}.weight"] = np.ones(MODEL.hidden, dtype=np.float32)
        sharp = np.full(size, 8 / math.sqrt(size), dtype=np.float32)
        gemma[f"{name}.self_attn.q_norm.weight"] = sharp
        gemma[f"{name}.self_attn.k_norm.weight"] = np.ones(size, dtype=np.float32)
        if is_large:
            gemma |= {
                f"{name}.self_attn.q_proj.weight": drawn(MODEL.heads * size, MODEL.hidden),
                f"{name}.self_attn.k_proj.weight": drawn(HEADS * size, MODEL.hidden),
                f"{name}.self_attn.v_proj.weight": drawn(HEADS * size, MODEL.hidden),
                f"{name}.self_attn.o_proj.weight": drawn(MODEL.hidden, MODEL.heads * size),
            }
    return gemma
