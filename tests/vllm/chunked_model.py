"""A tiny Llama 4: every second layer sees the tokens of its own chunk of CHUNK alone, the others
all. Its layers are dense: vLLM's CPU build computes experts, and they change no KV.

The weights are those of the tiny model, whose answers depend on every token of the prompt. That
has a norm on its queries, which Llama 4 has without a weight: here the projection is as strong.
"""

from pathlib import Path
from typing import Any

import numpy as np

from engine_ext.reference.tiny_model import TinyModel, Weights
from tests.vllm.changed_model import write_changed_model

CHUNK = 64
MODEL = TinyModel()
LLAMA4: dict[str, Any] = {
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "attention_chunk_size": CHUNK,
    "no_rope_layers": [1, 0] * (MODEL.layers // 2),
    "use_qk_norm": False,
    "attn_temperature_tuning": False,
    "intermediate_size_mlp": MODEL.intermediate,
    "interleave_moe_layer_step": 0,
    "moe_layers": [],
    "num_local_experts": 1,
    "num_experts_per_tok": 1,
}


def write_chunked_model(directory: Path) -> Path:
    return write_changed_model(directory, MODEL, LLAMA4, _as_llama4)


def _as_llama4(qwen: Weights) -> Weights:
    llama = {}
    for name, value in qwen.items():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            continue
        if name.endswith("q_proj.weight"):
            value = value * np.float32(MODEL.attention_sharpness)
        llama[name.replace(".mlp.", ".feed_forward.")] = value
    return llama
