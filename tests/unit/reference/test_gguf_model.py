"""A GGUF file into a model directory: what llama.cpp turned around is turned back."""

import json
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file
from tokenizers import Tokenizer

from engine_ext.reference.gguf_model import convert, in_halves
from engine_ext.reference.tokenizer import byte_alphabet

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, LAYERS = 4, 2, 8, 32, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for message in messages %}{{ message['role'] + message['content'] }}{% endfor %}"


def as_llama_cpp(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """How its converter lays out q and k: the two halves of each head interleaved."""
    each = rows.shape[0] // heads
    turned = rows.copy()
    for head in range(heads):
        for row in range(each // 2):
            for half in (0, 1):
                turned[head * each + 2 * row + half] = rows[head * each + half * each // 2 + row]
    return turned


def tensors() -> dict[str, NDArray[np.float32]]:
    """By their Hugging Face names."""
    random = np.random.default_rng(1)

    def drawn(*shape: int) -> NDArray[np.float32]:
        # Whole numbers survive bfloat16.
        return random.integers(-100, 100, shape).astype(np.float32)

    made = {"model.embed_tokens.weight": drawn(256 + len(SPECIAL) + 1, HIDDEN)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        made[f"{name}.input_layernorm.weight"] = drawn(HIDDEN)
        made[f"{name}.self_attn.q_proj.weight"] = drawn(HEADS * HEAD_DIM, HIDDEN)
        made[f"{name}.self_attn.k_proj.weight"] = drawn(KV_HEADS * HEAD_DIM, HIDDEN)
        made[f"{name}.self_attn.v_proj.weight"] = drawn(KV_HEADS * HEAD_DIM, HIDDEN)
        made[f"{name}.mlp.down_proj.weight"] = drawn(HIDDEN, 64)
    return made | {"model.norm.weight": drawn(HIDDEN)}


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(path: Path, pre: str = "smollm") -> dict[str, NDArray[np.float32]]:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    vocabulary = sorted(byte_alphabet(), key=lambda char: byte_alphabet()[char])
    writer.add_vocab_size(len(vocabulary) + len(SPECIAL) + 1)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*vocabulary, *SPECIAL, "ab"])
    writer.add_token_types([1] * len(vocabulary) + [3] * len(SPECIAL) + [1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_pad_token_id(258)
    writer.add_chat_template(TEMPLATE)
    expected = tensors()
    for name, values in expected.items():
        where, _, kind = name.removesuffix(".weight").removeprefix("model.layers.").partition(".")
        short = f"blk.{where}.{GGUF_NAMES[kind]}" if where.isdigit() else ""
        short = short or GGUF_NAMES[name.removesuffix(".weight")]
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(short.rpartition(".")[2])
        writer.add_tensor(f"{short}.weight", as_llama_cpp(values, heads) if heads else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def test_rows_of_q_and_k_are_where_hugging_face_has_them() -> None:
    rows = np.arange(32 * 3, dtype=np.float32).reshape(32, 3)
    assert (in_halves(as_llama_cpp(rows, 4), 4) == rows).all()


def test_a_file_becomes_a_model_directory(tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "model.gguf")
    made = tmp_path / "made"
    made.mkdir()
    convert(tmp_path / "model.gguf", made)
    weights = load_file(made / "model.safetensors")
    assert {name: w.float().numpy().tolist() for name, w in weights.items()} == {
        name: values.tolist() for name, values in expected.items()
    }
    config = json.loads((made / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (HEADS, KV_HEADS)
    assert config["tie_word_embeddings"]
    assert config["eos_token_id"] == 258


def test_its_tokenizer_keeps_digits_apart_and_knows_the_special_tokens(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    convert(tmp_path / "model.gguf", tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("<|im_end|>").ids == [258]
    assert tokenizer.encode("42 é").tokens == ["4", "2", "Ġ", "Ã", "©"]
    assert tokenizer.encode("cab").tokens == ["c", "ab"]
    assert tokenizer.decode(tokenizer.encode("42 é\n").ids) == "42 é\n"
    told = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert told["eos_token"] == "<|im_end|>"
    assert "message['content'] or ''" in told["chat_template"], "an agent's history has None there"
