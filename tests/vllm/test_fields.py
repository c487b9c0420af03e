"""What the router refuses before a prefiller works, vLLM refuses too."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.vllm.servers import ENVIRONMENT, INSIDE_SECONDS, Fleet

# Tokens that the prompt of tests.vllm.inside.fields leaves of its context.
LEFT = 95
ROOM = re.compile(r"max_tokens=\d+(?=, got)")


class Row(NamedTuple):
    is_chat: bool
    fields: dict[str, Any]
    ours: str
    vllms: str


@pytest.fixture(scope="module")
def rows(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    results: Path = tmp_path_factory.mktemp("fields") / "results.json"
    command = [str(fleet.python), "-m", "tests.vllm.inside.fields", str(results)]
    subprocess.run(command, check=True, env={**os.environ, **ENVIRONMENT}, timeout=INSIDE_SECONDS)
    return [Row(*row) for row in json.loads(results.read_text())]


def test_the_router_refuses_nothing_that_vllm_takes(rows: list[Row]) -> None:
    assert len(rows) > 2000
    assert [row for row in rows if row.ours and not row.vllms] == []


def test_its_words_are_vllms(rows: list[Row]) -> None:
    """Where one thing is wrong; but what vLLM takes for max_tokens where nobody said any is what
    the prompt leaves, or a completion's default, and the router knows the context alone."""
    alone = [row for row in rows if len(row.fields) == 1 and row.ours and not _is_odd(row)]
    assert len(alone) > 20
    # Of types: pydantic's, behind the field's name.
    said = [_bare(row.ours.rpartition(f"{next(iter(row.fields))}: ")[2]) for row in alone]
    wrong = [row for words, row in zip(said, alone, strict=True) if words not in _bare(row.vllms)]
    assert wrong == []


def test_what_it_leaves_to_vllm_hangs_on_the_prompt_or_might_be_a_number(rows: list[Row]) -> None:
    missed = [row for row in rows if row.vllms and not row.ours]
    assert missed
    assert [row for row in missed if not (_is_odd(row) or _exceeds(row.fields))] == []


def _bare(words: str) -> str:
    return ROOM.sub("max_tokens=", words)


def _is_odd(row: Row) -> bool:
    return any(isinstance(value, str) or value == 1e300 for value in row.fields.values())


def _exceeds(fields: dict[str, Any]) -> bool:
    """More tokens at least than fit beside the prompt, or than a completion has by default."""
    least = fields.get("min_tokens")
    return isinstance(least, int | float) and (least > LEFT or "max_tokens" not in fields)
