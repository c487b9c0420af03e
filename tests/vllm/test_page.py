"""docs/with-vllm.md: the commands for CPUs run as they are printed, with a model that is here."""

from pathlib import Path

import pytest

from tests.docs.blocks import run_page
from tests.docs.markdown import ROOT
from tests.docs.test_blocks import NEEDS_VLLM
from tests.vllm.servers import Fleet

MODEL = "Qwen/Qwen3-0.6B"


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_two_engines_and_the_router_on_cpus_start_as_the_page_says(
    fleet: Fleet, tmp_path: Path
) -> None:
    text = (ROOT / "docs" / NEEDS_VLLM).read_text(encoding="utf-8")
    assert MODEL in text
    (directory := tmp_path / "page").mkdir()
    (page := tmp_path / NEEDS_VLLM).write_text(text.replace(MODEL, str(fleet.model)))
    assert run_page(page, directory) == 6
