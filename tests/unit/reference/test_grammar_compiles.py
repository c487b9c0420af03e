"""A grammar that would never be compiled is refused, and takes no thread of the engine."""

import json
import sys
import time
from pathlib import Path

import pytest

from engine_ext.reference.grammar import COMPILE_TIMEOUT_S, GrammarCompiler, check_compiles
from engine_ext.reference.model_config import read_model_config
from engine_ext.reference.tiny_model import write_tiny_model

llguidance = pytest.importorskip("llguidance")
ENDLESS = json.dumps({"allOf": [{"type": "string", "pattern": f".*{n}.*"} for n in range(40)]})


@pytest.mark.slow
def test_a_grammar_without_end_is_refused_in_time(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model")
    compiler = GrammarCompiler(
        (directory / "tokenizer.json").read_text(),
        vocab_size=read_model_config(directory).vocab_size,
        eos_token_ids=read_model_config(directory).eos_token_ids,
    )
    started = time.monotonic()
    with pytest.raises(ValueError, match="too complex"):
        compiler.compile(ENDLESS)
    assert time.monotonic() - started < 3 * COMPILE_TIMEOUT_S


@pytest.mark.parametrize("definition", [llguidance.grammar_from("regex", "ab+"), "start: ("])
def test_any_other_passes(definition: str) -> None:
    check_compiles(definition, timeout_s=60)


def test_what_ends_its_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ValueError, match="too complex to be compiled"):
        check_compiles("start: /a/")
