import threading
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from engine_ext.reference import tiny_model
from engine_ext.reference.config import EngineConfig
from engine_ext.reference.engine import ReferenceEngine
from engine_ext.reference.host import build_engine
from engine_ext.reference.messages import GenerateRequest, SamplingParams
from engine_ext.reference.tiny_model import IM_END_ID, TinyModel, write_tiny_model
from engine_ext.reference.tokenizer import ChatTemplate, Tokenizer

FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory)


def test_the_same_seed_writes_the_same_bytes_and_nothing_else(
    directory: Path, tmp_path: Path
) -> None:
    again = contents(write_tiny_model(tmp_path))
    assert again == contents(directory)
    assert set(again) == FILES


def test_another_seed_writes_other_weights(directory: Path, tmp_path: Path) -> None:
    other = contents(write_tiny_model(tmp_path, TinyModel(seed=1)))
    assert other.pop("model.safetensors") != (directory / "model.safetensors").read_bytes()
    assert other.items() <= contents(directory).items()


def test_weights_spread_as_far_as_the_initializer_range_says(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    drawn = weights["model.layers.0.mlp.up_proj.weight"]
    assert drawn.dtype == np.float32
    assert drawn.std() == pytest.approx(0.1, rel=0.02)
    assert (weights["model.norm.weight"] == 1).all()
    assert (weights["model.layers.0.self_attn.q_norm.weight"] == 8).all()
    assert (weights["model.layers.0.self_attn.k_norm.weight"] == 1).all()


async def greedy(engine: ReferenceEngine, name: str, prompt: bytes) -> list[int]:
    sampling = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    request = GenerateRequest(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling)
    return [token async for output in engine.generate(request) for token in output.token_ids]


@pytest.mark.slow
@pytest.mark.parametrize("model", [TinyModel(), TinyModel(latent=64)], ids=["heads", "latent"])
async def test_one_changed_character_changes_most_of_the_answer(
    tmp_path: Path, model: TinyModel
) -> None:
    engine = build_engine(EngineConfig(model=write_tiny_model(tmp_path, model), num_threads=1))
    prompt = b"The quick brown fox jumps over the lazy dog. " * 22
    changed = bytearray(prompt)
    changed[100] ^= 1
    try:
        answer = await greedy(engine, "one", prompt)
        other = await greedy(engine, "other", bytes(changed))
    finally:
        engine.shutdown()
    assert len(set(answer)) > 10
    assert sum(a != b for a, b in zip(answer, other, strict=True)) > 16
    assert all(32 <= token < 127 or token == IM_END_ID for token in answer + other)


def test_the_model_is_small(directory: Path) -> None:
    assert sum(map(len, contents(directory).values())) < 10 * 2**20


def test_every_byte_is_its_own_token(tokenizer: Tokenizer) -> None:
    text = "plain, ünïcode, 漢字, \n\t\x00 and a ring: \u0157"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.backend.decode(list(text.encode())) == text
    assert all(tokenizer.token_bytes(byte) == bytes([byte]) for byte in range(256))


def test_special_tokens_are_single_and_can_be_skipped(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>a<|im_end|><|endoftext|>")
    assert ids == [257, ord("a"), 258, 256]
    assert tokenizer.backend.decode(ids) == "a"
    assert tokenizer.token_bytes(258) == b"<|im_end|>"


def test_a_conversation_is_rendered_as_chatml(directory: Path, tokenizer: Tokenizer) -> None:
    template = ChatTemplate.load(directory, tokenizer)
    assert template is not None
    rendered = template.render([{"role": "system", "content": "s"}, {"role": "user"}])
    assert rendered == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "wrong",
    [
        ["--heads", "3"],
        ["--layers", "0"],
        ["--seed", "-1"],
        ["--x"],
        ["--latent", "-1"],
        ["--rotated", "3"],
    ],
)
def test_a_shape_that_cannot_be_ends_with_one_line(
    wrong: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        tiny_model.main([str(tmp_path / "model"), *wrong])
    assert exit_.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_the_command_writes_a_model_of_the_shape_asked_for(tmp_path: Path) -> None:
    assert tiny_model.main([str(tmp_path), "--layers", "2", "--hidden", "64"]) == 0
    weights = load_file(tmp_path / "model.safetensors")
    assert weights["model.embed_tokens.weight"].shape == (259, 64)
    assert "model.layers.1.mlp.up_proj.weight" in weights
    assert "model.layers.2.mlp.up_proj.weight" not in weights


def test_other_threads_run_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    """The tokenizer does not hold the GIL, so that the server answers probes."""
    encoding = threading.Thread(target=tokenizer.encode, args=("many words " * 100_000,))
    turns = 0
    encoding.start()
    while encoding.is_alive():
        time.sleep(0)
        turns += 1
    assert turns > 100
