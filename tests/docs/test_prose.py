"""The pages and the product's texts use the field's words in short sentences."""

from pathlib import Path

import pytest

from tests.docs.markdown import pages
from tests.docs.prose import check_markdown, check_page, check_product

PAGES = pages()


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
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
