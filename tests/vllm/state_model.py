"""A tiny Falcon-H1: each layer has attention and, beside it, Mamba-2, which keeps a state.

The states forget slowly, over 10 to 1,000 tokens: with the usual decay a token is forgotten after
the next few, and a state that is another prompt's would not be seen in an answer.
"""

from pathlib import Path
from typing import Any

import numpy as np

from engine_ext.reference.tiny_model import VOCAB_SIZE, TinyModel, Weights
from tests.vllm.changed_model import normal, write_changed_model

MODEL = TinyModel(layers=2, hidden=64, heads=4, kv_heads=2, intermediate=128)
INNER, HEADS, STATE_SIZE, WIDTH = 128, 8, 16, 4
"""Of Mamba: channels, its heads, what each remembers by channel, and of how many tokens it takes a
mean at once."""
MIXED = INNER + 2 * STATE_SIZE
FALCON: dict[str, Any] = {
    "architectures": ["FalconH1ForCausalLM"],
    "model_type": "falcon_h1",
    "mamba_d_ssm": INNER,
    "mamba_n_heads": HEADS,
    "mamba_d_head": INNER // HEADS,
    "mamba_n_groups": 1,
    "mamba_d_state": STATE_SIZE,
    "mamba_d_conv": WIDTH,
    "mamba_chunk_size": 256,
    "mamba_rms_norm": False,
    "tie_word_embeddings": False,
}


def slow_decays(heads: int) -> Any:
    """Of a token, per head: what of it is forgotten with each one that follows."""
    return np.geomspace(0.001, 0.1, heads, dtype=np.float32)


def write_state_model(directory: Path) -> Path:
    weights = _weights(np.random.default_rng(0))
    return write_changed_model(directory, MODEL, FALCON, lambda _: weights)


def _weights(random: np.random.Generator) -> Weights:
    drawn = normal(random)

    def ones(size: int) -> Any:
        return np.ones(size, dtype=np.float32)

    hidden, wide = MODEL.hidden, MODEL.intermediate
    queries, keys = MODEL.heads * MODEL.head_dim, MODEL.kv_heads * MODEL.head_dim
    weights: Weights = {
        "model.embed_tokens.weight": drawn(VOCAB_SIZE, hidden),
        "lm_head.weight": drawn(VOCAB_SIZE, hidden),
        "model.final_layernorm.weight": ones(hidden),
    }
    for layer in range(MODEL.layers):
        of_layer = {
            "input_layernorm.weight": ones(hidden),
            "pre_ff_layernorm.weight": ones(hidden),
            "feed_forward.gate_proj.weight": drawn(wide, hidden),
            "feed_forward.up_proj.weight": drawn(wide, hidden),
            "feed_forward.down_proj.weight": drawn(hidden, wide),
            "self_attn.q_proj.weight": drawn(queries, hidden, scale=0.4),
            "self_attn.k_proj.weight": drawn(keys, hidden),
            "self_attn.v_proj.weight": drawn(keys, hidden),
            "self_attn.o_proj.weight": drawn(hidden, queries),
            "mamba.in_proj.weight": drawn(INNER + MIXED + HEADS, hidden),
            "mamba.conv1d.weight": drawn(MIXED, 1, WIDTH, scale=0.5),
            "mamba.conv1d.bias": drawn(MIXED),
            "mamba.A_log": np.log(slow_decays(HEADS)),
            "mamba.D": ones(HEADS),
            "mamba.dt_bias": ones(HEADS),
            "mamba.out_proj.weight": drawn(hidden, INNER),
        }
        weights |= {f"model.layers.{layer}.{name}": value for name, value in of_layer.items()}
    return weights
