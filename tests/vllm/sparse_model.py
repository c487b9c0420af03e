"""A tiny DeepSeek-V3.2 or GLM-5: latent attention to the tokens that an indexer chooses."""

from pathlib import Path
from typing import Any

import numpy as np

from engine_ext.reference.tiny_model import TinyModel, Weights
from tests.vllm.changed_model import normal, write_changed_model
from tests.vllm.mla_model import DEEPSEEK

MODEL = TinyModel(latent=512, rotated=64, attention_sharpness=4.0)
QUERY, HEADS, KEY = 96, 4, 128
CHOSEN = 48
"""Tokens that a token attends to."""
SPARSE: dict[str, Any] = {
    **DEEPSEEK,
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "q_lora_rank": QUERY,
    "index_n_heads": HEADS,
    "index_head_dim": KEY,
    "index_topk": CHOSEN,
}
EVERY_SECOND: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "index_topk_freq": 2,
    "index_skip_topk_offset": 1,
}


def write_sparse_model(directory: Path) -> Path:
    return write_changed_model(directory, MODEL, SPARSE, _as_sparse)


def write_glm_model(directory: Path) -> Path:
    """Every second layer takes the tokens that the one before has chosen."""
    return write_changed_model(directory, MODEL, SPARSE | EVERY_SECOND, _as_sparse)


def _as_sparse(deepseek: Weights) -> Weights:
    drawn = normal(np.random.default_rng(7))
    width = MODEL.heads * (MODEL.head_dim + MODEL.rotated)
    sparse = {name: value for name, value in deepseek.items() if "self_attn.q_proj" not in name}
    for layer in range(MODEL.layers):
        name = f"model.layers.{layer}.self_attn"
        sparse |= {
            f"{name}.q_a_proj.weight": drawn(QUERY, MODEL.hidden),
            f"{name}.q_a_layernorm.weight": np.ones(QUERY, dtype=np.float32),
            f"{name}.q_b_proj.weight": drawn(width, QUERY, scale=0.3),
            f"{name}.indexer.wq_b.weight": drawn(HEADS * KEY, QUERY),
            f"{name}.indexer.wk.weight": drawn(KEY, MODEL.hidden),
            f"{name}.indexer.k_norm.weight": np.ones(KEY, dtype=np.float32),
            f"{name}.indexer.k_norm.bias": np.zeros(KEY, dtype=np.float32),
            f"{name}.indexer.weights_proj.weight": drawn(HEADS, MODEL.hidden),
        }
    return sparse
