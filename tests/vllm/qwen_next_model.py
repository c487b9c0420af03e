"""A tiny Qwen3-Next: three layers of gated delta nets, which keep a state, to one of attention;
each layer has a mixture of experts.

The states forget as slowly as those of tests/vllm/state_model.py.
"""

from pathlib import Path
from typing import Any

import numpy as np

from engine_ext.reference.tiny_model import VOCAB_SIZE, TinyModel, Weights
from tests.vllm.changed_model import normal, write_changed_model
from tests.vllm.state_model import slow_decays

MODEL = TinyModel(layers=4, hidden=128, heads=4, kv_heads=2, intermediate=128)
KEY_HEADS, VALUE_HEADS, HEAD, WIDTH = 1, 2, 128, 4
"""Of a delta net, and of how many tokens it takes a mean at once."""
KEYS, VALUES = KEY_HEADS * HEAD, VALUE_HEADS * HEAD
EXPERTS, EXPERT = 4, 64
INTERVAL = 4
"""Of so many layers the last has attention."""
NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "full_attention_interval": INTERVAL,
    "linear_num_key_heads": KEY_HEADS,
    "linear_num_value_heads": VALUE_HEADS,
    "linear_key_head_dim": HEAD,
    "linear_value_head_dim": HEAD,
    "linear_conv_kernel_dim": WIDTH,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": EXPERT,
    "shared_expert_intermediate_size": EXPERT,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "torch_dtype": "bfloat16",
}


def write_qwen_next(directory: Path) -> Path:
    weights = _weights(np.random.default_rng(0))
    return write_changed_model(directory, MODEL, NEXT, lambda _: weights)


def _weights(random: np.random.Generator) -> Weights:
    drawn = normal(random)

    def full(size: int, value: float) -> Any:
        return np.full(size, value, dtype=np.float32)

    def mlp(name: str) -> Weights:
        return {
            f"{name}.gate_proj.weight": drawn(EXPERT, hidden),
            f"{name}.up_proj.weight": drawn(EXPERT, hidden),
            f"{name}.down_proj.weight": drawn(hidden, EXPERT),
        }

    hidden, head = MODEL.hidden, MODEL.head_dim
    queries, keys = MODEL.heads * head, MODEL.kv_heads * head
    weights: Weights = {
        "model.embed_tokens.weight": drawn(VOCAB_SIZE, hidden),
        "lm_head.weight": drawn(VOCAB_SIZE, hidden),
        "model.norm.weight": full(hidden, 0),
    }
    for layer in range(MODEL.layers):
        of_layer: Weights = {
            "input_layernorm.weight": full(hidden, 0),
            "post_attention_layernorm.weight": full(hidden, 0),
            "mlp.gate.weight": drawn(EXPERTS, hidden),
            "mlp.shared_expert_gate.weight": drawn(1, hidden),
            **mlp("mlp.shared_expert"),
        }
        for expert in range(EXPERTS):
            of_layer |= mlp(f"mlp.experts.{expert}")
        if layer % INTERVAL == INTERVAL - 1:
            of_layer |= {
                "self_attn.q_proj.weight": drawn(2 * queries, hidden),
                "self_attn.k_proj.weight": drawn(keys, hidden),
                "self_attn.v_proj.weight": drawn(keys, hidden),
                "self_attn.o_proj.weight": drawn(hidden, queries),
                "self_attn.q_norm.weight": full(head, MODEL.attention_sharpness - 1),
                "self_attn.k_norm.weight": full(head, 0),
            }
        else:
            of_layer |= {
                "linear_attn.in_proj_qkvz.weight": drawn(2 * KEYS + 2 * VALUES, hidden),
                "linear_attn.in_proj_ba.weight": drawn(2 * VALUE_HEADS, hidden),
                "linear_attn.conv1d.weight": drawn(2 * KEYS + VALUES, 1, WIDTH, scale=0.5),
                "linear_attn.A_log": np.log(slow_decays(VALUE_HEADS)),
                "linear_attn.dt_bias": full(VALUE_HEADS, 1),
                "linear_attn.norm.weight": full(HEAD, 1),
                "linear_attn.out_proj.weight": drawn(hidden, VALUES),
            }
        weights |= {f"model.layers.{layer}.{name}": value for name, value in of_layer.items()}
    return weights
