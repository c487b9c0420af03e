"""Tiny LoRA adapters of the tests' model, as PEFT writes them.

They change every projection by about as much as it is, so that one adapter's keys and values under
another's name change an answer at its first token.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from engine_ext.reference.tiny_model import TinyModel

MODEL = TinyModel()
RANK = 4


def write_adapter(directory: Path, seed: int) -> Path:
    """For `write_tiny_model` with its defaults."""
    attention, keys = MODEL.heads * MODEL.head_dim, MODEL.kv_heads * MODEL.head_dim
    shapes = {
        "self_attn.q_proj": (attention, MODEL.hidden),
        "self_attn.k_proj": (keys, MODEL.hidden),
        "self_attn.v_proj": (keys, MODEL.hidden),
        "self_attn.o_proj": (MODEL.hidden, attention),
        "mlp.gate_proj": (MODEL.intermediate, MODEL.hidden),
        "mlp.up_proj": (MODEL.intermediate, MODEL.hidden),
        "mlp.down_proj": (MODEL.hidden, MODEL.intermediate),
    }
    random, weights = np.random.default_rng(seed), {}
    for layer in range(MODEL.layers):
        for name, (out, into) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            for side, shape in (("lora_A", (RANK, into)), ("lora_B", (out, RANK))):
                drawn = random.normal(0, 0.2, shape).astype(np.float32)
                weights[f"{prefix}.{side}.weight"] = drawn
    directory.mkdir()
    (directory / "adapter_model.safetensors").write_bytes(save(weights, {"format": "pt"}))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in shapes}),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
