"""docs/conversations.md names what the code has."""

from __future__ import annotations

import re
from pathlib import Path

from router.settings import IDS, Settings, flag_of
from router.telemetry.metrics import Metrics

ROOT = Path(__file__).parents[4]
TEXT = (ROOT / "docs" / "conversations.md").read_text(encoding="utf-8")


OF_VLLM = {"--enable-prompt-tokens-details"}


def test_every_metric_in_the_document_exists() -> None:
    known = {sample.name for family in Metrics().registry.collect() for sample in family.samples}
    known |= {
        name + "_total"
        for family in Metrics().registry.collect()
        if family.type == "counter"
        for name in [family.name]
    }
    named = set(re.findall(r"`(disagg_router_\w+)`", TEXT))
    assert len(named) >= 7
    assert named <= known


def test_every_flag_in_the_document_exists() -> None:
    named = set(re.findall(r"`(--[a-z-]+)", TEXT))
    assert named
    assert named - OF_VLLM <= set(map(flag_of, Settings.model_fields))


def test_the_ids_are_documented_in_their_order() -> None:
    places = [TEXT.lower().index(f"`{name}`") for name in IDS]
    assert places == sorted(places)


def test_every_test_that_the_documents_name_exists() -> None:
    sources = (path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/test_*.py"))
    known = {name for source in sources for name in re.findall(r"def (test_\w+)", source)}
    for document in ("conversation-tests.md", "engine-tests.md"):
        text = (ROOT / "docs" / document).read_text(encoding="utf-8")
        named = set(re.findall(r"::(test_\w+)(\*?)", text))
        assert len(named) > 20
        for name, rest in named:
            assert name in known or (rest and any(each.startswith(name) for each in known)), name
