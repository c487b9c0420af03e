from pathlib import Path

import pytest

from engine_ext.reference.config import EngineConfig
from engine_ext.reference.engine import ReferenceEngine
from engine_ext.reference.host import build_engine
from engine_ext.reference.messages import GenerateRequest, SamplingParams
from engine_ext.reference.tiny_model import IM_END_ID, TinyModel, write_tiny_model
from engine_ext.reference.tokenizer import Tokenizer

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


def test_every_byte_is_its_own_token(tokenizer: Tokenizer) -> None:
    text = "plain, ünïcode, 漢字, \n\t\x00 and a ring: \u0157"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.backend.decode(list(text.encode())) == text
    assert all(tokenizer.token_bytes(byte) == bytes([byte]) for byte in range(256))
