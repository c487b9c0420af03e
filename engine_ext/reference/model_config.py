"""The model's shape, read from a Hugging Face directory, and what two engines must agree on before
one may use the other's KV.

Equal architecture is not enough: KV of other weights loads without complaint and answers nonsense.
Hashing all weights would take minutes for a real model, so each safetensors file counts with its
size, its header (names, shapes, offsets) and a sample of its bytes.
"""

import hashlib
import json
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from engine_ext.common.short_hash import short_hash
from engine_ext.common.types import CONFIGURATION
from engine_ext.reference.tokenizer import Tokenizer, chat_template_source, read_json_object

_ARCHITECTURES = ("Qwen3ForCausalLM", "LlamaForCausalLM", "DeepseekV2ForCausalLM")
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_SAMPLES, _SAMPLE_BYTES = 64, 4096
_UNSUPPORTED = ("quantization_config", "use_sliding_window", "mlp_bias", "attention_bias")


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434). A token's cache is one latent
    vector, of which keys and values of all heads are made, and one rotated key that they share."""

    rank: int
    """Of the latent vector."""
    rotated: int
    plain: int
    """Of a head's query and key, beside the rotated part."""
    value: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    """1 with latent attention: the cache has one vector for all heads."""
    head_dim: int
    """Of a query and of a key; their product is divided by its root."""
    latent: LatentShape | None
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    tie_word_embeddings: bool
    eos_token_ids: frozenset[int]
    dtype: torch.dtype
    """Of weights, activations and KV cache."""

    @property
    def qk_norm(self) -> bool:
        return self.architecture == "Qwen3ForCausalLM"

    @property
    def row_dim(self) -> int:
        """Values that the cache has of one token, layer and KV head."""
        return self.latent.rank + self.latent.rotated if self.latent else 2 * self.head_dim


def read_model_config(directory: Path, dtype: str = "auto", device: str = "cpu") -> ModelConfig:
    """Raises ValueError, one line, for a directory this engine cannot run."""
    path = directory / "config.json"
    raw = read_json_object(path)
    if not raw:
        raise ValueError(f"{path} does not exist")
    try:
        return _parse(raw, _eos_token_ids(directory, raw), _resolve_dtype(raw, dtype, device))
    except KeyError as missing:
        raise ValueError(f"{path} lacks {missing}") from None
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def _parse(raw: dict[str, Any], eos: frozenset[int], dtype: torch.dtype) -> ModelConfig:
    names = raw.get("architectures") or ["none"]
    architecture = next((name for name in names if name in _ARCHITECTURES), None)
    if architecture is None:
        supported = ", ".join(_ARCHITECTURES)
        unknown = ", ".join(map(str, names))
        raise ValueError(f"unsupported architecture {unknown}; supported: {supported}")
    for name in _UNSUPPORTED:
        if raw.get(name):
            raise ValueError(f"unsupported {name}; this engine runs plain dense models only")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"unsupported hidden_act {raw['hidden_act']!r}; supported: silu")
    heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    latent = _latent(raw) if architecture.startswith("Deepseek") else None
    kv_heads = 1 if latent else int(raw.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise ValueError(f"{heads} attention heads do not divide into {kv_heads} key-value heads")
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=(
            latent.plain + latent.rotated if latent else int(raw.get("head_dim") or hidden // heads)
        ),
        latent=latent,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=int(raw["max_position_embeddings"]),
        rope_theta=_rope_theta(raw),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        eos_token_ids=eos,
        dtype=dtype,
    )


def _latent(raw: dict[str, Any]) -> LatentShape:
    dense = raw.get("first_k_dense_replace", 0)
    if raw.get("n_routed_experts") and dense < raw["num_hidden_layers"]:
        raise ValueError("unsupported n_routed_experts; only dense layers are supported")
    if raw.get("q_lora_rank"):
        raise ValueError("unsupported q_lora_rank; only latent attention without it is supported")
    return LatentShape(
        rank=int(raw["kv_lora_rank"]),
        rotated=int(raw["qk_rope_head_dim"]),
        plain=int(raw["qk_nope_head_dim"]),
        value=int(raw["v_head_dim"]),
    )


def _rope_theta(raw: dict[str, Any]) -> float:
    # transformers 5 writes rope_parameters, earlier versions rope_theta and rope_scaling.
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"unsupported rope type {kind!r}; supported: default")
    if float(rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))) != 1.0:
        raise ValueError("unsupported partial_rotary_factor; only full rotation is supported")
    return float(rope.get("rope_theta", raw.get("rope_theta", 10_000.0)))


def _eos_token_ids(directory: Path, raw: dict[str, Any]) -> frozenset[int]:
    found: set[int] = set()
    for source in (raw, read_json_object(directory / "generation_config.json")):
        value = source.get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(found)


def _resolve_dtype(raw: dict[str, Any], asked: str, device: str) -> torch.dtype:
    if asked == "auto":
        own = raw.get("dtype") or raw.get("torch_dtype") or "float32"
        asked = "float32" if device == "cpu" else own
    if asked not in _DTYPES:
        raise ValueError(f"unsupported dtype {asked!r}; supported: auto, {', '.join(_DTYPES)}")
    return _DTYPES[asked]


def model_factors(directory: Path, config: ModelConfig) -> dict[str, str]:
    """Factors of the compatibility hash, each readable by the operator who meets a mismatch."""
    return {
        "architecture": config.architecture,
        "dtype": str(config.dtype).removeprefix("torch."),
        "num_layers": str(config.num_layers),
        "num_kv_heads": str(config.num_kv_heads),
        "head_dim": str(config.head_dim),
        **({"latent": str(config.latent)} if config.latent else {}),
        "rope": f"{config.rope_theta:g} None",
        "weights": _weights_digest(directory),
        CONFIGURATION: short_hash(repr(replace(config, eos_token_ids=frozenset()))),
    }


def renders(directory: Path) -> dict[str, str]:
    """Return hashes of what two engines must share to read token ids and render messages alike."""
    tokenizer = Tokenizer.load(directory)
    named = json.dumps([tokenizer.special_tokens, bool(tokenizer.config.get("add_bos_token"))])
    template = chat_template_source(directory, tokenizer)
    return {
        "model": _weights_digest(directory),
        "tokenizer": short_hash(named, (directory / "tokenizer.json").read_bytes()),
        "chat_template": "none" if template is None else short_hash(named, template),
    }


def _weights_digest(directory: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        digest.update(path.name.encode())
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            (header_bytes,) = struct.unpack("<Q", prefix.ljust(8, b"\0"))
            digest.update(prefix + file.read(min(header_bytes, size)))
            for i in range(_SAMPLES):
                file.seek(8 + header_bytes + max(0, size - 8 - header_bytes) * i // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
        digest.update(str(size).encode())
    return digest.hexdigest()[:16]
