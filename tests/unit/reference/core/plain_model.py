"""The same transformers written the long way: no cache, no blocks, nothing fused, float64.

Written from the model descriptions, to be compared with; it shares no code with the engine.
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


def log_probabilities(directory: Path, token_ids: Sequence[int]) -> Tensor:
    """[tokens, vocab]: for each position, of what comes after it."""
    config = json.loads((directory / "config.json").read_text())
    weights = {n: t.double() for n, t in load_file(directory / "model.safetensors").items()}
    x = weights["model.embed_tokens.weight"][list(token_ids)]
    for i in range(config["num_hidden_layers"]):
        layer = {
            name.removeprefix(f"model.layers.{i}."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"model.layers.{i}.")
        }
        x = x + _attention(config, layer, _norm(config, x, layer["input_layernorm.weight"]))
        x = x + _mlp(layer, _norm(config, x, layer["post_attention_layernorm.weight"]))
    x = _norm(config, x, weights["model.norm.weight"])
    head = "model.embed_tokens" if config.get("tie_word_embeddings") else "lm_head"
    return (x @ weights[f"{head}.weight"].T).log_softmax(-1)


def _attention(config: dict[str, Any], layer: dict[str, Tensor], x: Tensor) -> Tensor:
    make = _latent_heads if "kv_lora_rank" in config else _grouped_heads
    mixed = []
    for query, key, value in make(config, layer, x):
        scores = query @ key.T / math.sqrt(query.shape[-1])
        future = torch.ones_like(scores).triu(1).bool()
        mixed.append(scores.masked_fill(future, -math.inf).softmax(-1) @ value)
    return _linear(layer, torch.cat(mixed, -1), "self_attn.o_proj")


def _grouped_heads(
    config: dict[str, Any], layer: dict[str, Tensor], x: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    queries = _heads(layer, x, "q", heads)
    keys = _heads(layer, x, "k", kv_heads)
    values = _heads(layer, x, "v", kv_heads)
    if "self_attn.q_norm.weight" in layer:
        queries = [_norm(config, q, layer["self_attn.q_norm.weight"]) for q in queries]
        keys = [_norm(config, k, layer["self_attn.k_norm.weight"]) for k in keys]
    queries = [_turn(config, q) for q in queries]
    keys = [_turn(config, k) for k in keys]
    for h, query in enumerate(queries):
        yield query, keys[h * kv_heads // heads], values[h * kv_heads // heads]


def _latent_heads(
    config: dict[str, Any], layer: dict[str, Tensor], x: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Every head's keys and values are made out of the latent vector."""
    heads, rank, plain = (
        config[name] for name in ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim")
    )
    down = _linear(layer, x, "self_attn.kv_a_proj_with_mqa")
    latent = _norm(config, down[:, :rank], layer["self_attn.kv_a_layernorm.weight"])
    shared = _turn_neighbours(config, down[:, rank:])
    queries = _heads(layer, x, "q", heads)
    made = _linear(layer, latent, "self_attn.kv_b_proj").chunk(heads, dim=-1)
    for query, both in zip(queries, made, strict=True):
        turned = torch.cat((query[:, :plain], _turn_neighbours(config, query[:, plain:])), -1)
        yield turned, torch.cat((both[:, :plain], shared), -1), both[:, plain:]


def _heads(layer: dict[str, Tensor], x: Tensor, which: str, count: int) -> list[Tensor]:
    return list(_linear(layer, x, f"self_attn.{which}_proj").chunk(count, dim=-1))


def _linear(layer: dict[str, Tensor], x: Tensor, name: str) -> Tensor:
    return x @ layer[f"{name}.weight"].T


def _mlp(layer: dict[str, Tensor], x: Tensor) -> Tensor:
    gate = _linear(layer, x, "mlp.gate_proj")
    return _linear(layer, gate * gate.sigmoid() * _linear(layer, x, "mlp.up_proj"), "mlp.down_proj")


def _norm(config: dict[str, Any], x: Tensor, weight: Tensor) -> Tensor:
    eps: float = config["rms_norm_eps"]
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _turn(config: dict[str, Any], x: Tensor) -> Tensor:
    """Each pair (x[i], x[i + d/2]) as a complex number, turned by position * frequency."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[:, :half], x[:, half:]) * _turns(config, x)
    return torch.cat((turned.real, turned.imag), -1)


def _turn_neighbours(config: dict[str, Any], x: Tensor) -> Tensor:
    """Each pair (x[2i], x[2i + 1])."""
    turned = torch.complex(x[:, 0::2], x[:, 1::2]) * _turns(config, x)
    return torch.view_as_real(turned).flatten(1)


def _turns(config: dict[str, Any], x: Tensor) -> Tensor:
    frequencies = [_frequency(config, 2 * i / x.shape[-1]) for i in range(x.shape[-1] // 2)]
    angles = torch.outer(
        torch.arange(x.shape[0], dtype=torch.float64), torch.tensor(frequencies).double()
    )
    return torch.polar(torch.ones_like(angles), angles)


def _frequency(config: dict[str, Any], exponent: float) -> float:
    frequency = config["rope_theta"] ** -exponent
    return float(frequency)
