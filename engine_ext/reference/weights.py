"""Checkpoint tensors, checked against the model's shape and fused for fewer, larger products."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine_ext.reference.model_config import LatentShape, ModelConfig

Shape = tuple[int, ...]


class Folded(NamedTuple):
    qkv: Tensor
    """[num_heads * row_dim + row_dim, hidden]: queries, then the latent vector and rotated key."""
    output: Tensor
    """[hidden, num_heads * rank]"""


def expected_latent_shapes(config: ModelConfig, latent: LatentShape) -> dict[str, Shape]:
    heads, hidden = config.num_heads, config.hidden_size
    return {
        "self_attn.q_proj.weight": (heads * config.head_dim, hidden),
        "self_attn.kv_a_proj_with_mqa.weight": (config.row_dim, hidden),
        "self_attn.kv_a_layernorm.weight": (latent.rank,),
        "self_attn.kv_b_proj.weight": (heads * (latent.plain + latent.value), latent.rank),
        "self_attn.o_proj.weight": (hidden, heads * latent.value),
    }


def fold(own: dict[str, Tensor], config: ModelConfig, latent: LatentShape) -> Folded:
    heads, hidden = config.num_heads, config.hidden_size
    up = own["self_attn.kv_b_proj.weight"].view(heads, -1, latent.rank)
    up_key, up_value = up.tensor_split((latent.plain,), dim=1)
    query = own["self_attn.q_proj.weight"].view(heads, -1, hidden)
    plain, rotated = query.tensor_split((latent.plain,), dim=1)
    down, key = own["self_attn.kv_a_proj_with_mqa.weight"].tensor_split((latent.rank,))
    queries = torch.cat((up_key.mT @ plain, _in_halves(rotated)), dim=1).flatten(0, 1)
    output = own["self_attn.o_proj.weight"].view(hidden, heads, -1).transpose(0, 1) @ up_value
    return Folded(
        torch.cat((queries, down, _in_halves(key))),
        output.transpose(0, 1).reshape(hidden, -1),
    )


def _in_halves(rows: Tensor) -> Tensor:
    """DeepSeek rotates neighbours, `rotate` the halves: queries and keys are both reordered, which
    leaves their products what they are."""
    return torch.cat((rows[..., 0::2, :], rows[..., 1::2, :]), dim=-2)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    input_norm: Tensor
    qkv: Tensor
    """[(num_heads + 2 * num_kv_heads) * head_dim, hidden]; with latent attention see `Folded`."""
    qkv_bias: Tensor | None
    head_norms: Tensor | None
    """[num_heads + num_kv_heads, head_dim]: of the queries, then of the keys."""
    latent_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    """[2 * intermediate, hidden]"""
    down: Tensor


@dataclass(frozen=True, slots=True)
class ModelWeights:
    embedding: Tensor
    """[vocab, hidden]"""
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor
    """[vocab, hidden]; the embedding itself where the two are tied."""


def load_weights(directory: Path, config: ModelConfig, device: torch.device) -> ModelWeights:
    """Raises ValueError, one line, for missing, unexpected or misshapen tensors."""
    checkpoint = _Checkpoint(directory)
    checkpoint.check(_expected_shapes(config), ignored=_ignored_names(config))
    tensors = checkpoint.read(config.dtype, device)
    embedding = tensors["model.embed_tokens.weight"]
    return ModelWeights(
        embedding=embedding,
        layers=tuple(_fuse_layer(tensors, i, config) for i in range(config.num_layers)),
        norm=tensors["model.norm.weight"],
        head=embedding if config.tie_word_embeddings else tensors["lm_head.weight"],
    )


class _Checkpoint:
    """The safetensors files of a directory, by the tensors they hold."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file_of = {name: path for path in _files(directory) for name in _names(path)}

    def check(self, expected: dict[str, Shape], ignored: frozenset[str]) -> None:
        found = {n for n in self._file_of if n not in ignored and not n.endswith("inv_freq")}
        _refuse("lacks", expected.keys() - found, self._directory)
        _refuse("holds unexpected", found - expected.keys(), self._directory)
        for path, names in self._by_file(expected):
            with safe_open(path, framework="pt") as file:
                for name in names:
                    shape = tuple(file.get_slice(name).get_shape())
                    if shape != expected[name]:
                        raise ValueError(
                            f"{path}: {name} has shape {shape}, the config says {expected[name]}"
                        )

    def read(self, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for path, names in self._by_file(self._file_of):
            with safe_open(path, framework="pt") as file:
                tensors |= {n: file.get_tensor(n).to(device=device, dtype=dtype) for n in names}
        return tensors

    def _by_file(
        self, names: dict[str, Shape] | dict[str, Path]
    ) -> Iterator[tuple[Path, list[str]]]:
        for path in sorted(set(self._file_of.values())):
            yield path, [name for name in names if self._file_of[name] == path]


def _files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return [directory / "model.safetensors"]
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{index} is not a safetensors index: {error}") from None
    return [directory / name for name in sorted(names)]


def _names(path: Path) -> list[str]:
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def _refuse(what: str, names: set[str], directory: Path) -> None:
    if names:
        some = ", ".join(sorted(names)[:3])
        raise ValueError(f"the checkpoint in {directory} {what} {len(names)} tensors, e.g. {some}")


def _ignored_names(config: ModelConfig) -> frozenset[str]:
    return frozenset({"lm_head.weight"} if config.tie_word_embeddings else ())


def _expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for i in range(config.num_layers):
        layer = _expected_layer_shapes(config)
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def _expected_layer_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, mlp = config.hidden_size, config.intermediate_size
    return _expected_attention_shapes(config) | {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (mlp, hidden),
        "mlp.up_proj.weight": (mlp, hidden),
        "mlp.down_proj.weight": (hidden, mlp),
    }


def _expected_attention_shapes(config: ModelConfig) -> dict[str, Shape]:
    if config.latent is not None:
        return expected_latent_shapes(config, config.latent)
    hidden = config.hidden_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, Shape] = {
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
    }
    if config.qk_norm:
        shapes |= {f"self_attn.{n}_norm.weight": (config.head_dim,) for n in "qk"}
    if config.qkv_bias:
        shapes |= {
            f"self_attn.{n}_proj.bias": (size,) for n, size in zip("qkv", (q, kv, kv), strict=True)
        }
    if config.output_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    return shapes


def _fuse_layer(tensors: dict[str, Tensor], index: int, config: ModelConfig) -> LayerWeights:
    """Takes the layer's tensors out of `tensors`, so that fusing needs one layer's memory."""
    prefix = f"model.layers.{index}."
    own = {n.removeprefix(prefix): tensors.pop(n) for n in list(tensors) if n.startswith(prefix)}

    def fused(pattern: str, names: tuple[str, ...]) -> Tensor | None:
        parts = [own.pop(pattern.format(name), None) for name in names]
        present = [part for part in parts if part is not None]
        return torch.cat(present) if present else None

    qkv: Tensor | None
    if config.latent is not None:
        qkv, own["self_attn.o_proj.weight"] = fold(own, config, config.latent)
    else:
        qkv = fused("self_attn.{}_proj.weight", ("q", "k", "v"))
    gate_up = fused("mlp.{}_proj.weight", ("gate", "up"))
    assert qkv is not None
    assert gate_up is not None
    return LayerWeights(
        input_norm=own["input_layernorm.weight"],
        qkv=qkv,
        qkv_bias=fused("self_attn.{}_proj.bias", ("q", "k", "v")),
        head_norms=_head_norms(own, config) if config.qk_norm else None,
        latent_norm=own.get("self_attn.kv_a_layernorm.weight"),
        output=own["self_attn.o_proj.weight"],
        output_bias=own.get("self_attn.o_proj.bias"),
        mlp_norm=own["post_attention_layernorm.weight"],
        gate_up=gate_up,
        down=own["mlp.down_proj.weight"],
    )


def _head_norms(own: dict[str, Tensor], config: ModelConfig) -> Tensor:
    sizes = (("q", config.num_heads), ("k", config.num_kv_heads))
    return torch.cat([own[f"self_attn.{n}_norm.weight"].expand(size, -1) for n, size in sizes])
