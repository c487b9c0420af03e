"""vLLM's chat endpoint and /tokenize read the reasoning of a history under different names."""

import json
from pathlib import Path

import pytest

from tests.vllm.releases import BUILD, NEXT, python_of
from tests.vllm.servers import Fleet
from tests.vllm.test_releases import run_inside


@pytest.mark.parametrize("release", [BUILD, NEXT])
def test_tokenize_gets_of_the_router_what_the_chat_endpoint_reads(
    fleet: Fleet, tmp_path: Path, release: str
) -> None:
    results = tmp_path / "results.json"
    run_inside(python_of(fleet, release), "tests.vllm.inside.reasoning", str(results))
    rows = json.loads(results.read_text())
    assert len(rows) == 25
    assert [row for row in rows if row[1] != row[3]] == []
    ignored = {"role": "assistant", "content": "\nYes", "reasoning_content": "hm"}
    assert [chat != plain for answer, chat, plain, _ in rows if answer == ignored] == [True]
