"""A tiny Qwen3-MoE: the tiny model, whose MLPs are cut into experts. Each token has two of them."""

from pathlib import Path
from typing import Any

import numpy as np

from engine_ext.reference.tiny_model import TinyModel, Weights
from tests.vllm.changed_model import write_changed_model

EXPERTS = 4
MODEL = TinyModel()
QWEN_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": MODEL.intermediate // EXPERTS,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def write_experts_model(directory: Path) -> Path:
    return write_changed_model(directory, MODEL, QWEN_MOE, _with_experts)


def _with_experts(dense: Weights) -> Weights:
    weights = {name: value for name, value in dense.items() if ".mlp." not in name}
    random = np.random.default_rng(MODEL.seed)
    for layer in range(MODEL.layers):
        mlp = f"model.layers.{layer}.mlp"
        weights[f"{mlp}.gate.weight"] = random.normal(
            0, MODEL.initializer_range, (EXPERTS, MODEL.hidden)
        ).astype(np.float32)
        for name, axis in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
            parts = np.split(dense[f"{mlp}.{name}.weight"], EXPERTS, axis)
            for expert, part in enumerate(parts):
                weights[f"{mlp}.experts.{expert}.{name}.weight"] = np.ascontiguousarray(part)
    return weights
