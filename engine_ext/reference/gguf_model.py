"""A GGUF file of the Llama family, as llama.cpp reads one, into a Hugging Face model directory.

Two things are not as they are in the file. llama.cpp keeps the rows of q and k in the order of its
own rotary embedding, pairs beside each other; Hugging Face has halves. And a GGUF file describes
its tokenizer by vocabulary and merges alone: text is split before them as SmolLM2 wants it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save
from tokenizers import Tokenizer, pre_tokenizers

from engine_ext.reference.tiny_model import byte_level_tokenizer, write_files

Fields = dict[str, Any]

CONTROL = 3
"""The type of a token that is never text."""
OUTSIDE = {
    "token_embd": "model.embed_tokens.weight",
    "output_norm": "model.norm.weight",
    "output": "lm_head.weight",
}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Histories of agents have answers without content.
STRICT, LENIENT = "message['content']", "(message['content'] or '')"


def convert(source: Path, target: Path) -> None:
    """Write the model to `target`, an existing directory; weights as float32."""
    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    weights = dict(_weights(reader, fields))
    ids = {
        f"{name}_token_id": fields[f"tokenizer.ggml.{kind}_token_id"]
        for name, kind in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    files: dict[str, Any] = {
        "model.safetensors": save(weights, {"format": "pt"}),
        "tokenizer.json": _tokenizer(fields).to_str(pretty=True).encode(),
        "tokenizer_config.json": _tokenizer_config(fields, ids),
        "generation_config.json": ids,
        "config.json": _config(fields, is_tied="lm_head.weight" not in weights) | ids,
    }
    write_files(target, files)


def _weights(reader: "gguf.GGUFReader", fields: Fields) -> Iterator[tuple[str, torch.Tensor]]:
    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    for tensor in reader.tensors:
        place, *rest = tensor.name.split(".")
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if place == "blk":
            layer, kind = rest[0], rest[1]
            name = f"model.layers.{layer}.{IN_LAYER[kind]}.weight"
            if kind in heads:
                values = in_halves(values, heads[kind])
        else:
            name = OUTSIDE[place]
        yield name, torch.from_numpy(np.ascontiguousarray(values))


def in_halves(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Of each head the even rows, then the odd ones: they were pairs beside each other."""
    each = rows.shape[0] // heads
    return rows.reshape(heads, each // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _tokenizer(fields: Fields) -> Tokenizer:
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    digits = pre_tokenizers.Digits(individual_digits=True)
    return byte_level_tokenizer(vocabulary, merges, special, digits)


def _tokenizer_config(fields: Fields, ids: dict[str, int]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        **{name.removesuffix("_id"): tokens[number] for name, number in ids.items()},
        "chat_template": fields["tokenizer.chat_template"].replace(STRICT, LENIENT),
    }


def _config(fields: Fields, *, is_tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": is_tied,
        "torch_dtype": "float32",
    }
