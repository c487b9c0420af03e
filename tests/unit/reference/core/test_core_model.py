"""The model's arithmetic against an implementation that shares nothing with it; the loader."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine_ext.reference.config import EngineConfig
from engine_ext.reference.host import build_engine, build_model
from engine_ext.reference.kv_cache import KVCache, max_model_len
from engine_ext.reference.model import BatchBuilder, ChunkInput
from engine_ext.reference.model_config import read_model_config
from tests.unit.reference.core.harness import BLOCK, prompt
from tests.unit.reference.core.plain_model import log_probabilities

CPU = torch.device("cpu")
TINY: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
LATENT = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "num_key_value_heads": 6,
    "q_lora_rank": None,
    "kv_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": None,
}
WriteModel = Callable[..., Path]


def random_weights(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.1

    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    attention = latent_attention if "kv_lora_rank" in config else grouped_attention
    weights = {
        "model.embed_tokens.weight": normal(config["vocab_size"], hidden),
        "model.norm.weight": 1 + normal(hidden),
    }
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = normal(config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": 1 + normal(hidden),
            "post_attention_layernorm.weight": 1 + normal(hidden),
            "mlp.gate_proj.weight": normal(mlp, hidden),
            "mlp.up_proj.weight": normal(mlp, hidden),
            "mlp.down_proj.weight": normal(hidden, mlp),
            **{f"self_attn.{name}": it for name, it in attention(config, normal).items()},
        }
        weights |= {f"model.layers.{i}.{name}": tensor for name, tensor in layer.items()}
    return weights


def grouped_attention(
    config: dict[str, Any], normal: Callable[..., torch.Tensor]
) -> dict[str, torch.Tensor]:
    hidden, d = config["hidden_size"], config["head_dim"]
    sizes = {"q": config["num_attention_heads"] * d}
    sizes |= dict.fromkeys("kv", config["num_key_value_heads"] * d)
    layer = {"o_proj.weight": normal(hidden, sizes["q"])}
    for name, size in sizes.items():
        layer[f"{name}_proj.weight"] = normal(size, hidden)
    if config["architectures"] == ["Qwen3ForCausalLM"]:
        layer |= {f"{n}_norm.weight": 1 + normal(d) for n in "qk"}
    return layer


def latent_attention(
    config: dict[str, Any], normal: Callable[..., torch.Tensor]
) -> dict[str, torch.Tensor]:
    hidden, heads, rank = (
        config[name] for name in ("hidden_size", "num_attention_heads", "kv_lora_rank")
    )
    rotated, plain, value = (
        config[name] for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    return {
        "q_proj.weight": 3 * normal(heads * (plain + rotated), hidden),
        "kv_a_proj_with_mqa.weight": normal(rank + rotated, hidden),
        "kv_a_layernorm.weight": 1 + normal(rank),
        "kv_b_proj.weight": 3 * normal(heads * (plain + value), rank),
        "o_proj.weight": normal(hidden, heads * value),
    }


@pytest.fixture
def write_model(tmp_path: Path) -> WriteModel:
    def write(**changes: Any) -> Path:
        config = TINY | changes
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file(random_weights(config), tmp_path / "model.safetensors")
        return tmp_path

    return write


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="qwen3"),
        pytest.param({"tie_word_embeddings": True}, id="qwen3 tied"),
        pytest.param({"architectures": ["LlamaForCausalLM"]}, id="llama"),
        pytest.param(LATENT, id="deepseek v2"),
    ],
)
def test_chunks_over_scattered_blocks_equal_plain_attention(
    write_model: WriteModel, changes: dict[str, Any]
) -> None:
    directory = write_model(**changes)
    config = read_model_config(directory)
    model = build_model(EngineConfig(model=directory, num_blocks=40), config)
    cache = KVCache(config, num_blocks=40, block_size=BLOCK, device=CPU)
    build = BatchBuilder(config, block_size=BLOCK, device=CPU).build
    one, two = prompt(150), prompt(90, seed=4)
    tables = (list(range(39, 19, -1)), [3, 1, 19, 4, 15, 9, 2, 6, 5, 8, 7, 11])
    expected = (log_probabilities(directory, one), log_probabilities(directory, two))

    def run(*spans: tuple[int, int, int]) -> None:
        inputs = [
            ChunkInput((one, two)[i][a:z], a, tables[i][: -(-z // BLOCK)]) for i, a, z in spans
        ]
        got = model.forward(build(inputs), cache.layers).log_softmax(-1)
        for row, (i, _, z) in zip(got, spans, strict=True):
            torch.testing.assert_close(row.double(), expected[i][z - 1], atol=2e-5, rtol=0)

    run((0, 0, 40))
    run((0, 40, 41), (1, 0, 33))
    run((0, 41, 149), (1, 33, 89))
    run((0, 149, 150), (1, 89, 90))


@pytest.mark.parametrize("changes", [{}, LATENT], ids=["qwen3", "deepseek v2"])
def test_a_long_chunk_over_a_context_sees_all_before_it(
    write_model: WriteModel, changes: dict[str, Any]
) -> None:
    directory = write_model(max_position_embeddings=2048, **changes)
    config = read_model_config(directory)
    model = build_model(EngineConfig(model=directory, num_blocks=200), config)
    cache = KVCache(config, num_blocks=200, block_size=BLOCK, device=CPU)
    build = BatchBuilder(config, block_size=BLOCK, device=CPU).build
    tokens, table = prompt(1100), list(range(1, 140))
    model.forward(build([ChunkInput(tokens[:30], 0, table)]), cache.layers)
    got = model.forward(build([ChunkInput(tokens[30:], 30, table)]), cache.layers)
    expected = log_probabilities(directory, tokens)[-1]
    torch.testing.assert_close(got[0].log_softmax(-1).double(), expected, atol=5e-5, rtol=0)


def test_single_rows_of_16_bits_are_near_those_of_32(write_model: WriteModel) -> None:
    """One row takes a way of its own through the 16-bit products."""
    directory = write_model()
    rows = [_last_of_two_steps(directory, dtype) for dtype in ("float32", "bfloat16")]
    exact, rounded = (row.log_softmax(-1) for row in rows)
    torch.testing.assert_close(rounded, exact, atol=0.1, rtol=0)


def _last_of_two_steps(directory: Path, dtype: str) -> torch.Tensor:
    config = read_model_config(directory, dtype)
    model = build_model(EngineConfig(model=directory, num_blocks=40, dtype=dtype), config)
    cache = KVCache(config, num_blocks=40, block_size=BLOCK, device=CPU)
    build = BatchBuilder(config, block_size=BLOCK, device=CPU).build
    tokens, table = prompt(60), list(range(1, 9))
    model.forward(build([ChunkInput(tokens[:59], 0, table)]), cache.layers)
    return model.forward(build([ChunkInput(tokens[59:], 59, table)]), cache.layers)


def test_zeroing_reaches_the_named_blocks_in_every_layer(write_model: WriteModel) -> None:
    directory = write_model()
    config = read_model_config(directory)
    cache = KVCache(config, num_blocks=4, block_size=BLOCK, device=CPU)
    for layer in cache.layers:
        layer[1:] = float("nan")
    cache.zero([2])
    assert all(layer[2].eq(0).all() for layer in cache.layers)
    assert all(layer[[1, 3]].isnan().all() for layer in cache.layers)


def test_engines_of_a_host_share_weights_and_memory_is_used_with_blocks(
    write_model: WriteModel,
) -> None:
    directory = write_model()
    config = read_model_config(directory)
    model = build_model(EngineConfig(model=directory), config)
    assert str(directory / "model.safetensors") in Path("/proc/self/maps").read_text()
    before = Path("/proc/self/statm").read_text().split()[1]
    cache = KVCache(config, num_blocks=2**17, block_size=BLOCK, device=CPU)
    after = Path("/proc/self/statm").read_text().split()[1]
    assert sum(layer.nbytes for layer in cache.layers) == 2**29
    assert (int(after) - int(before)) * os.sysconf("SC_PAGE_SIZE") < 2**26
    del model


@pytest.mark.parametrize(
    ("changes", "shape"),
    [({}, (2, BLOCK, 32)), (LATENT, (1, BLOCK, 48))],
    ids=["heads", "latent"],
)
def test_regions_name_and_cover_each_layer(
    write_model: WriteModel, changes: dict[str, Any], shape: tuple[int, ...]
) -> None:
    config = read_model_config(write_model(**changes))
    cache = KVCache(config, num_blocks=7, block_size=BLOCK, device=CPU)
    regions = cache.regions()
    assert [r.name for r in regions] == [f"model.layers.{i}.self_attn.attn" for i in range(2)]
    for region, layer in zip(regions, cache.layers, strict=True):
        assert tuple(layer.shape) == (7, *shape)
        assert region.base_addr + 3 * region.block_stride == layer[3].data_ptr()
        assert region.block_len == layer[3].nbytes == region.block_stride
        assert region.mem_type == "DRAM"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_model_len": 4096}, "512 positions"),
        ({"max_model_len": 500, "num_blocks": 5}, "128 tokens"),
        ({"kv_cache_memory_mib": 1, "block_size": 2048}, "kv_cache_memory_mib"),
        ({"device": "tpu"}, "device"),
        ({"device": "nonsense:x"}, "device"),
        ({"dtype": "int4"}, "int4"),
    ],
)
def test_a_configuration_that_cannot_run_is_refused(
    write_model: WriteModel, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        build_engine(EngineConfig(model=write_model(), **changes))


def test_the_longest_request_fits_an_empty_cache(write_model: WriteModel) -> None:
    directory = write_model()
    config = EngineConfig(model=directory, num_blocks=5, block_size=BLOCK)
    assert max_model_len(config, read_model_config(directory)) == 4 * BLOCK
