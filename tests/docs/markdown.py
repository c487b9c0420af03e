"""Read the parts of a Markdown page that the checks of the documentation need."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<language>\w*)")
COMMENT = re.compile(r"<!--(?P<text>.*?)-->", re.DOTALL)
HEADING = re.compile(r"^(#{1,6}) +(.*?)(?: *\{#(?P<id>[\w-]+)\})?$")


def pages() -> list[Path]:
    """Return the pages of the site, and the Markdown files beside it that people read first."""
    names = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
    return [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / name for name in names)]


@dataclass(frozen=True)
class Line:
    """One line of a page. `language` is None outside of a fenced code block."""

    number: int
    text: str
    language: str | None = None


def lines_of(text: str) -> Iterator[Line]:
    """Yield the lines of a page, without the lines of the fences themselves."""
    fence, language = "", ""
    for number, line in enumerate(text.splitlines(), 1):
        match = FENCE.match(line)
        if not fence and match:
            fence, language = match["fence"], match["language"] or "text"
        elif fence and line.strip() == fence:
            fence = ""
        else:
            yield Line(number, line, language if fence else None)


def without_comments(text: str) -> str:
    """Blank HTML comments, and keep the number of lines."""
    return COMMENT.sub(lambda match: "\n" * match[0].count("\n"), text)
