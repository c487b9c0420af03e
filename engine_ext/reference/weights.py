"""Checkpoint tensors, checked against the model's shape.

Where the checkpoint has the data type that a CPU computes in, the tensors are pages of the file,
which all engines of a host share. Those that are fused for fewer, larger products are copies."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from engine_ext.reference.model_config import ModelConfig

Take = Callable[..., Tensor]
"""`take(name, *shape)` removes a tensor from the checkpoint; ValueError for a missing one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    input_norm: Tensor
    qkv: Tensor
    """[(num_heads + 2 * num_kv_heads) * head_dim, hidden]; with latent attention
    [num_heads * row_dim + row_dim, hidden]: queries, then the latent vector and rotated key."""
    head_norms: Tensor | None = None
    """[num_heads + num_kv_heads, head_dim]: of the queries, then of the keys."""
    latent_norm: Tensor | None = None
    output: Tensor
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class ModelWeights:
    embedding: Tensor
    """[vocab, hidden]"""
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor
    """[vocab, hidden]; the embedding itself if the two are tied."""


def load_weights(directory: Path, config: ModelConfig, device: torch.device) -> ModelWeights:
    """Raises ValueError, one line, for missing, unexpected or misshapen tensors."""
    tensors = _read_tensors(directory, config.dtype, device)
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)

    def take(name: str, *shape: int) -> Tensor:
        if name not in tensors:
            raise ValueError(f"the checkpoint in {directory} lacks {name}")
        tensor = tensors.pop(name)
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{directory}: {name} has shape {tuple(tensor.shape)}, the config has {shape}"
            )
        return tensor

    vocab = (config.vocab_size, config.hidden_size)
    embedding = take("model.embed_tokens.weight", *vocab)
    weights = ModelWeights(
        embedding=embedding,
        layers=tuple(_layer(take, i, config) for i in range(config.num_layers)),
        norm=take("model.norm.weight", config.hidden_size),
        head=embedding if config.tie_word_embeddings else take("lm_head.weight", *vocab),
    )
    if tensors:
        some = ", ".join(sorted(tensors)[:3])
        raise ValueError(
            f"the checkpoint in {directory} holds unexpected {len(tensors)} tensors, e.g. {some}"
        )
    return weights


def _read_tensors(directory: Path, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    paths = sorted(directory.glob("model*.safetensors"))
    if not paths:
        raise ValueError(f"{directory / 'model.safetensors'} does not exist")
    for path in paths:
        try:
            loaded = load_file(path)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
        for name, tensor in loaded.items():
            if not name.endswith("inv_freq"):
                tensors[name] = tensor.to(device=device, dtype=dtype)
    return tensors


def _layer(take_any: Take, index: int, config: ModelConfig) -> LayerWeights:
    hidden, mlp = config.hidden_size, config.intermediate_size

    def take(name: str, *shape: int) -> Tensor:
        return take_any(f"model.layers.{index}.{name}", *shape)

    fuse = _latent_attention if config.latent else _grouped_attention
    return LayerWeights(
        **fuse(take, config),
        input_norm=take("input_layernorm.weight", hidden),
        mlp_norm=take("post_attention_layernorm.weight", hidden),
        gate=take("mlp.gate_proj.weight", mlp, hidden),
        up=take("mlp.up_proj.weight", mlp, hidden),
        down=take("mlp.down_proj.weight", hidden, mlp),
    )


def _grouped_attention(take: Take, config: ModelConfig) -> dict[str, Tensor]:
    hidden, dim = config.hidden_size, config.head_dim
    heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    fused = {
        "qkv": torch.cat(
            [take(f"self_attn.{n}_proj.weight", heads[n] * dim, hidden) for n in heads]
        ),
        "output": take("self_attn.o_proj.weight", hidden, heads["q"] * dim),
    }
    if config.qk_norm:
        norms = [take(f"self_attn.{n}_norm.weight", dim).expand(heads[n], -1) for n in "qk"]
        fused["head_norms"] = torch.cat(norms)
    return fused


def _latent_attention(take: Take, config: ModelConfig) -> dict[str, Tensor]:
    """Folds the projections of latent attention into those of one shared head.

    A head's key is `up_key @ latent`, so its product with a query is that of `up_key.T @ query`
    with the latent vector itself; likewise values need not be made before they are added up. With
    `up_key` in the query's projection and `up_value` in the output's, all heads attend to the one
    row that the cache has of a token, and nothing of the cache is ever expanded. That makes the
    projections larger: it is for small models.
    """
    heads, hidden, latent = config.num_heads, config.hidden_size, config.latent
    assert latent is not None
    query = take("self_attn.q_proj.weight", heads * config.head_dim, hidden)
    shared = take("self_attn.kv_a_proj_with_mqa.weight", config.row_dim, hidden)
    norm = take("self_attn.kv_a_layernorm.weight", latent.rank)
    up = take("self_attn.kv_b_proj.weight", heads * (latent.plain + latent.value), latent.rank)
    output = take("self_attn.o_proj.weight", hidden, heads * latent.value)

    plain, rotated = query.view(heads, -1, hidden).tensor_split((latent.plain,), dim=1)
    up_key, up_value = up.view(heads, -1, latent.rank).tensor_split((latent.plain,), dim=1)
    queries = torch.cat((up_key.mT @ plain, _in_halves(rotated)), dim=1).flatten(0, 1)
    down, key = shared.tensor_split((latent.rank,))
    folded = output.view(hidden, heads, -1).transpose(0, 1) @ up_value
    return {
        "qkv": torch.cat((queries, down, _in_halves(key))),
        "latent_norm": norm,
        "output": folded.transpose(0, 1).reshape(hidden, -1),
    }


def _in_halves(rows: Tensor) -> Tensor:
    """DeepSeek rotates neighbours, `rotate` the halves: queries and keys are both reordered, which
    leaves their products what they are."""
    return torch.cat((rows[..., 0::2, :], rows[..., 1::2, :]), dim=-2)
