"""The pages and the product's texts use the field's words in short sentences."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, pages
from tests.docs.prose import check_markdown, check_page, check_product

CLEAN = {
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "README.md",
    "SECURITY.md",
    "docs/admission.md",
    "docs/architecture.md",
    "docs/clients.md",
    "docs/comparison.md",
    "docs/conversations.md",
    "docs/development.md",
    "docs/discovery.md",
    "docs/do-i-need-this.md",
    "docs/endpoints.md",
    "docs/engine-configuration.md",
    "docs/engine-half.md",
    "docs/failures.md",
    "docs/index.md",
    "docs/kubernetes-start.md",
    "docs/kubernetes.md",
    "docs/metrics.md",
    "docs/observability.md",
    "docs/performance.md",
    "docs/quick-start.md",
    "docs/routing.md",
    "docs/security.md",
    "docs/settings.md",
    "docs/support.md",
    "docs/test-inventory.md",
    "docs/troubleshooting.md",
    "docs/upgrades.md",
    "docs/wire-protocol.md",
    "docs/with-vllm.md",
}
"""Pages that pass. Add a page when it does."""
CHECKED = [page for page in pages() if str(page.relative_to(ROOT)) in CLEAN]


@pytest.mark.parametrize("page", CHECKED, ids=[page.name for page in CHECKED])
def test_page_passes_the_linter(page: Path) -> None:
    assert [*map(str, check_page(page))] == []


def test_settings_and_metrics_pass_the_linter() -> None:
    assert [*map(str, check_product())] == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The engine is\ntold which blocks.", "told"),
        ("The request who comes first.", "request who"),
        ("| a | b |\n|---|---|\n| proof | x |", "proof"),
        ("# Who is asked", "Who is asked"),
        ("* " + "word " * 41 + "end.", "word word word word word word ..."),
        (("one two three four five " * 6 + "\n") * 2, "one two three four five one ..."),
    ],
)
def test_linter_finds(text: str, found: str) -> None:
    assert found in [one.text for one in check_markdown(text, "page.md")]


@pytest.mark.parametrize(
    "text",
    [
        "```sh\necho told\n```",
        "`told` and [a link](https://told.example/told)",
        "<!-- told\ntold -->",
        "Users who send a name, say, `x`.",
        "* " + "word " * 30 + "end.\n* " + "word " * 30,
        "word " * 30 + "end. " + "Word " * 30 + "end.",
        "| " + "word " * 50 + " |",
    ],
)
def test_linter_passes(text: str) -> None:
    assert list(check_markdown(text, "page.md")) == []
