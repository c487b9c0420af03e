"""Writes a tiny random model: a complete Hugging Face directory that vLLM runs unchanged.

`python -m engine_ext.reference.tiny_model DIR`. It talks gibberish, on purpose: what matters is
that its answer depends on every token of the prompt, so that equal tokens prove equal KV. Two
things see to that. The usual `initializer_range` of 0.02 makes random models repeat one token for
ever; 0.1 does not. And random queries attend to everything alike, so that among 1,000 tokens no
single one counts; made 8 times as sharp, they choose. One changed token of 1,000 then changes three
quarters or more of the next 32 (before: often none), and float noise in log-probabilities stays
near 1e-5.

With `--latent 64` it is a DeepSeek-V2 without experts: multi-head latent attention.
"""

import argparse
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine_ext.reference.tokenizer import byte_alphabet

ENDOFTEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (ENDOFTEXT, IM_START, IM_END)
ENDOFTEXT_ID, IM_START_ID, IM_END_ID = 256, 257, 258
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)

CHATML = """\
{%- if tools %}{{- '<|im_start|>tools\\n' + tools | tojson + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

_TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": 0,
    "clean_up_tokenization_spaces": False,
    "add_prefix_space": False,
    "bos_token": None,
    "eos_token": IM_END,
    "pad_token": ENDOFTEXT,
    "additional_special_tokens": [IM_START, IM_END],
    "chat_template": CHATML,
}
_GENERATION_CONFIG = {
    "bos_token_id": ENDOFTEXT_ID,
    "pad_token_id": ENDOFTEXT_ID,
    "eos_token_id": [IM_END_ID, ENDOFTEXT_ID],
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
}

Weights = dict[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """The shape of the model. The defaults make 3 MiB of float32 weights.

    `head_dim` is a multiple of 32 because vLLM's CPU attention wants it so.
    """

    layers: int = 4
    hidden: int = 128
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    latent: int = 0
    """Rank of the latent vector of which keys and values are made; 0: the usual attention."""
    rotated: int = 32
    """Of a key, beside `head_dim`, where there is a latent vector."""
    intermediate: int = 256
    max_positions: int = 8192
    initializer_range: float = 0.1
    attention_sharpness: float = 8.0
    """Weight of the norm on the queries, or a factor in what they are projected with; every other
    norm has 1."""
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = (self.layers, self.hidden, self.heads, self.kv_heads, self.intermediate)
        is_even = self.head_dim % 2 == self.rotated % 2 == 0
        if min(*sizes, self.head_dim, self.rotated, self.max_positions) < 1 or not is_even:
            raise ValueError("every size of the tiny model must be at least 1, those of heads even")
        if self.heads % self.kv_heads or min(self.latent, self.seed) < 0:
            raise ValueError("heads must divide by kv_heads; latent and seed are not negative")


def write_tiny_model(directory: Path, model: TinyModel | None = None) -> Path:
    """Writes the model, the same bytes for the same `model`, and returns `directory`. One token is
    one byte: the token's id is the byte's value."""
    model = model or TinyModel()
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level_tokenizer(byte_alphabet(), [], SPECIAL_TOKENS)
    files: dict[str, Any] = {
        "model.safetensors": save(_weights(model), {"format": "pt"}),
        "tokenizer.json": tokenizer.to_str(pretty=True).encode(),
        "tokenizer_config.json": _TOKENIZER_CONFIG | {"model_max_length": model.max_positions},
        "generation_config.json": _GENERATION_CONFIG,
        "config.json": _config(model),
    }
    write_files(directory, files)
    return directory


def write_files(directory: Path, files: dict[str, Any]) -> None:
    """Contents are bytes, or objects for JSON. Files are replaced one by one, `config.json` last: a
    directory that has it is complete."""
    for name, content in files.items():
        if isinstance(content, dict):
            content = (json.dumps(content, indent=2) + "\n").encode()
        scratch = directory / f".{name}.{os.getpid()}"
        scratch.write_bytes(content)
        scratch.replace(directory / name)


def _config(model: TinyModel) -> dict[str, Any]:
    if model.latent:
        attention = {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "num_key_value_heads": model.heads,
            "q_lora_rank": None,
            "kv_lora_rank": model.latent,
            "qk_rope_head_dim": model.rotated,
            "qk_nope_head_dim": model.head_dim,
            "v_head_dim": model.head_dim,
            "n_routed_experts": None,
            "first_k_dense_replace": model.layers,
        }
    else:
        attention = {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "num_key_value_heads": model.kv_heads,
            "head_dim": model.head_dim,
        }
    return {
        **attention,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "bos_token_id": ENDOFTEXT_ID,
        "eos_token_id": IM_END_ID,
        "torch_dtype": "float32",
    }


def byte_level_tokenizer(
    vocabulary: dict[str, int],
    merges: list[tuple[str, str]],
    special: Iterable[str],
    *first_split: pre_tokenizers.PreTokenizer,
) -> Tokenizer:
    """Byte-level BPE, as GPT-2 has it; `first_split` divides the text before."""
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first_split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokens = [AddedToken(token, special=True, normalized=False) for token in special]
    tokenizer.add_special_tokens(tokens)
    return tokenizer


def _weights(model: TinyModel) -> Weights:
    random = np.random.default_rng(model.seed)
    weights: Weights = {}
    for name, shape in _shapes(model):
        if len(shape) == 1:
            gain = model.attention_sharpness if "q_norm" in name else 1.0
            weights[name] = np.full(shape, gain, dtype=np.float32)
        else:
            drawn = random.standard_normal(shape, dtype=np.float32)
            weights[name] = drawn * np.float32(model.initializer_range)
            if model.latent and "q_proj" in name:
                weights[name] *= np.float32(model.attention_sharpness)
    # Weak rows for what a terminal cannot show, so that the gibberish is at least readable.
    scale = np.full(VOCAB_SIZE, 0.1, dtype=np.float32)
    scale[0x20:0x7F] = 1.0
    scale[IM_END_ID] = 1.0
    weights["lm_head.weight"] *= scale[:, None]
    return weights


def _shapes(model: TinyModel) -> Iterator[tuple[str, tuple[int, ...]]]:
    """In the order of the random draws."""
    hidden, queries = model.hidden, model.heads * model.head_dim
    keys = model.kv_heads * model.head_dim
    attention: dict[str, tuple[int, ...]]
    if model.latent:
        attention = {
            "q_proj": (model.heads * (model.head_dim + model.rotated), hidden),
            "kv_a_proj_with_mqa": (model.latent + model.rotated, hidden),
            "kv_a_layernorm": (model.latent,),
            "kv_b_proj": (2 * queries, model.latent),
            "o_proj": (hidden, queries),
        }
    else:
        attention = {
            "q_proj": (queries, hidden),
            "k_proj": (keys, hidden),
            "v_proj": (keys, hidden),
            "o_proj": (hidden, queries),
            "q_norm": (model.head_dim,),
            "k_norm": (model.head_dim,),
        }
    layer = {
        "input_layernorm": (hidden,),
        **{f"self_attn.{name}": shape for name, shape in attention.items()},
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (model.intermediate, hidden),
        "mlp.up_proj": (model.intermediate, hidden),
        "mlp.down_proj": (hidden, model.intermediate),
    }
    yield "model.embed_tokens.weight", (VOCAB_SIZE, hidden)
    for index in range(model.layers):
        for name, shape in layer.items():
            yield f"model.layers.{index}.{name}.weight", shape
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (VOCAB_SIZE, hidden)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m engine_ext.reference.tiny_model",
        description="Write a tiny random Qwen3 model with a byte-level tokenizer.",
    )
    parser.add_argument("directory", type=Path, help="where to write it; made if missing")
    for field in fields(TinyModel):
        option, kind = f"--{field.name.replace('_', '-')}", type(field.default)
        parser.add_argument(option, type=kind, default=field.default, help="default %(default)s")
    options = vars(parser.parse_args(arguments))
    directory = options.pop("directory")
    try:
        write_tiny_model(directory, TinyModel(**options))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
