from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_ext.reference.model_config import model_factors, read_model_config, renders
from engine_ext.reference.tiny_model import write_tiny_model
from engine_ext.wire.handshake import compatibility_hash


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path)
    return tmp_path


def test_a_copy_in_another_place_has_the_same_factors(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    write_tiny_model(copy)
    config = read_model_config(model)
    assert model_factors(model, config) == model_factors(copy, read_model_config(copy))


def test_other_weights_of_the_same_shape_differ(model: Path) -> None:
    config = read_model_config(model)
    before = model_factors(model, config)
    weights = load_file(model / "model.safetensors")
    save_file({name: tensor * 1.5 for name, tensor in weights.items()}, model / "model.safetensors")
    changed = model_factors(model, config)
    assert {key for key in before if before[key] != changed[key]} == {"weights"}


def test_another_dtype_differs_by_name(model: Path) -> None:
    config = read_model_config(model)
    other = model_factors(model, replace(config, dtype=torch.bfloat16))
    assert other["dtype"] == "bfloat16"
    assert model_factors(model, config)["dtype"] == "float32"


def test_another_configuration_of_the_same_weights_differs(model: Path) -> None:
    config = read_model_config(model)
    before, other = (model_factors(model, one) for one in (config, replace(config, rms_norm_eps=1)))
    assert {key for key in before if before[key] != other[key]} == {"configuration"}
    assert compatibility_hash(before) == compatibility_hash(other)


def test_what_two_engines_render_with_is_told_apart(model: Path, tmp_path: Path) -> None:
    before = renders(model)
    assert renders(write_tiny_model(tmp_path / "copy")) == before
    assert all(len(value) == 16 for value in before.values())

    def changed() -> set[str]:
        return {name for name, value in renders(model).items() if value != before[name]}

    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert changed() == {"chat_template"}
    path = model / "tokenizer.json"
    path.write_text(path.read_text() + " ")
    assert changed() == {"chat_template", "tokenizer"}
    weights = load_file(model / "model.safetensors")
    save_file({name: tensor * 1.5 for name, tensor in weights.items()}, model / "model.safetensors")
    assert changed() == {"chat_template", "tokenizer", "model"}


def test_a_base_model_has_no_template_to_differ_in(model: Path) -> None:
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        (model / name).unlink(missing_ok=True)
    assert renders(model)["chat_template"] == "none"
