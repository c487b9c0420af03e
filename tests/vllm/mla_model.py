"""A tiny DeepSeek-V2: multi-head latent attention in vLLM, see tests/vllm/test_mla.py.

Ranks 512 and 64 are those of DeepSeek: vLLM's CPU kernel has no other. Positions are stretched by
YaRN, as in every DeepSeek: without it, vLLM 0.32's CPU build rotates by a kernel that takes the
heads of a query for its tokens, so that an answer depends on what else was in its batch, and one
engine alone says something else when it computes the same tokens again.
"""

from pathlib import Path
from typing import Any

from engine_ext.reference.tiny_model import TinyModel
from tests.vllm.changed_model import write_changed_model

MODEL = TinyModel(latent=512, rotated=64, attention_sharpness=4.0)
DEEPSEEK: dict[str, Any] = {
    "rope_scaling": {
        "type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": MODEL.max_positions // 2,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "norm_topk_prob": False,
}
"""vLLM asks for the shape of experts, of which no layer has any."""

BACKEND = ("--attention-backend", "CPU_MLA")
"""For servers of it: where a CPU has AMX, vLLM takes a backend that knows no float32."""


def write_mla_model(directory: Path) -> Path:
    return write_changed_model(directory, MODEL, DEEPSEEK)
