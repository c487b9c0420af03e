"""Links of the Markdown files outside of docs/ resolve. `mkdocs build --strict` checks docs/."""

import re
from pathlib import Path

import pytest

from tests.docs.markdown import HEADING, ROOT, lines_of, pages, without_comments

LINK = re.compile(
    r"\[(?:[^\[\]]|\[[^\]]*\])*\]\((?P<target>[^)\s]+)(?: \"[^\"]*\")?\)"
    r"|<(?:a|img)\b[^>]* (?:href|src)=\"(?P<attribute>[^\"]+)\""
)
IN_REPOSITORY = re.compile(r"https://[^/]+/[^/]+/disagg-router/(?:blob|tree|raw)/main/(?P<path>.+)")
IN_SITE = re.compile(
    r"https?://[^/]+/disagg-router/(?P<page>[\w/-]*)(?:\.html|/)?(?P<anchor>#.*)?$"
)
NAMED_PAGE = re.compile(r"(?<![\w/])docs/[\w-]+\.md(?:#[\w-]+)?")
SOURCES = (
    ".py",
    ".yaml",
    ".yml",
    ".txt",
    ".tpl",
    ".toml",
    ".js",
    ".html",
    ".sh",
    ".css",
    ".service",
)
OUTSIDE = [page for page in pages() if page.parent == ROOT]


def targets_of(text: str) -> list[str]:
    prose = "\n".join(
        re.sub(r"`[^`]*`", "`", line.text)
        for line in lines_of(without_comments(text))
        if line.language is None
    )
    return [next(filter(None, match.groups())) for match in LINK.finditer(prose)]


def anchors_of(text: str) -> set[str]:
    """Return the anchors of headings, as GitHub and mkdocs make them."""
    anchors: set[str] = set()
    for line in lines_of(text):
        if line.language is None and (match := HEADING.match(line.text)):
            title = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", match[2]).lower()
            slug = re.sub(r"[^\w\- ]", "", title).strip().replace(" ", "-")
            # mkdocs writes one hyphen where GitHub writes several.
            anchors |= {match["id"] or slug, re.sub(r"-+", "-", slug)}
    return anchors


def problem_of(target: str, page: Path) -> str | None:
    """Return why a link of `page` does not resolve, or None. The network is not used."""
    if match := IN_REPOSITORY.match(target):
        target = "/" + match["path"]
    elif match := IN_SITE.match(target):
        target = f"/docs/{match['page'] or 'index'}.md{match['anchor'] or ''}"
    elif re.match(r"\w+:", target):
        return None
    name, _, anchor = target.partition("#")
    path = ROOT / name[1:] if name.startswith("/") else page.parent / name if name else page
    if not path.exists():
        return f"{target}: there is no such file"
    if anchor and anchor not in anchors_of(path.read_text(encoding="utf-8")):
        return f"{target}: {path.name} has no such heading"
    return None


@pytest.mark.parametrize("page", OUTSIDE, ids=[page.name for page in OUTSIDE])
def test_links_outside_of_the_site_resolve(page: Path) -> None:
    targets = targets_of(page.read_text(encoding="utf-8"))
    assert [problem for target in targets if (problem := problem_of(target, page))] == []


def test_pages_that_code_and_charts_name_exist() -> None:
    problems = []
    for folder in ("router", "engine_ext", "scripts", "charts", "examples", "tests"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in SOURCES and path.name != Path(__file__).name:
                for target in NAMED_PAGE.findall(path.read_text(encoding="utf-8")):
                    if problem := problem_of(target, ROOT / "README.md"):
                        problems.append(f"{path.relative_to(ROOT)}: {problem}")
    assert problems == []


def test_links_that_do_not_resolve_are_found() -> None:
    text = (
        "[a](docs/no.md) [b](docs/index.md#no) ![c](docs/images/no.svg)\n"
        "[d](https://github.com/someone/disagg-router/blob/main/docs/no.md)\n"
        "```sh\n[in code](docs/no2.md)\n```\n"
        "[fine](docs/index.md#disagg-router) [outside](https://github.com/no/no)\n"
    )
    problems = [problem_of(target, ROOT / "README.md") for target in targets_of(text)]
    assert [problem and problem.partition(":")[0] for problem in problems] == [
        "docs/no.md",
        "docs/index.md#no",
        "docs/images/no.svg",
        "/docs/no.md",
        None,
        None,
    ]
