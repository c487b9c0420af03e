"""A small linter for the language of the documentation and of the product's texts.

    python -m tests.docs.prose                  # all pages and texts
    python -m tests.docs.prose docs/clients.md  # some pages

It finds private words where the field has a term, vague pronouns, things that speak, headings that
are riddles, and long sentences. Code, links' targets and HTML comments are not looked at.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from router.settings import Settings, description_of, flag_of
from router.telemetry.metrics import Metrics
from tests.docs.markdown import HEADING, ROOT, Line, lines_of, pages, without_comments

CHART = ROOT / "charts" / "disagg-router"
MAX_WORDS = 40
PEOPLE = r"(?:people|person|users?|operators?|readers?|anyone|everyone|those|you|team|engineers?)"
BANNED = {
    # Things do not speak.
    r"told|tells?|said|says|(?<!, )say(?!,)|asks|asked": "sends, returns, reports, logs, shows",
    r"believed?|believes|belief|trust map": "verified prefix, accepts, threat model",
    r"proofs?|proven|unproven": "prefix hash, verified prefix",
    # Nouns instead of pronouns.
    r"(?:no|some|any|every)body|someone|whoever|whom": "name the actor",
    rf"(?!{PEOPLE}\b)\w+,? who": "name the actor; a request or engine is no person",
    r"ours|theirs": "repeat the noun",
    r"the rest(?! of)": "repeat the noun",
    r"so many|none but": "say what happens first",
    r"at nobody's cost": "without failing a request",
    # One concept, one word.
    r"mid-answer|in the middle of an answer": "mid-stream",
    r"(?:goes|go|going|went) on(?! to)|spoken": "continues, resumes",
    r"hand(?:s|ed)? back": "preemption return, returns",
    r"scatter(?:s|ed|ing)?": "hedged request",
    r"seats?|doors?|entrances?": "slot, permit, queue; authentication",
    r"roster|census": "registry, reconcile",
    r"strangers?": "unauthenticated peer",
    r"learn(?:s|ed|t)": "detects; capability",
    r"owed|mates?": "use the field's term",
    r"asking": "attempt, request leg",
    r"between two tokens": "ITL",
    # History belongs to the changelog.
    r"nowadays|formerly|as of old": "no history in user pages",
    r"anew|in vain|for want of|hears?|heard": "plain words: again, without effect, for lack of",
}
WORDS = [(re.compile(rf"\b(?:{words})\b", re.I), advice) for words, advice in BANNED.items()]
RIDDLE = re.compile(
    r"^(?:who|whom|whose|what|nobody)\b(?! is supported| to )|^(?:coming|going)$", re.IGNORECASE
)
END = re.compile(r"(?<=[.!?])[\"')*_]*\s+(?=[\"'(*_]*[A-Z0-9`]|\w+: )")
NAME = re.compile(r"[\w.]*[._]\w+|\{[^{}]*\}")
LINK_TARGET = re.compile(r"\]\([^)]*\)|\]\[[^\]]*\]|<https?://[^>]*>|https?://\S+|</?a\b[^>]*>")
ITEM = re.compile(r"^\s*(?:[*+-]|\d+\.) +")
REFERENCE = re.compile(r"^\s*(?:\[[^\]]+\]: |!!!|\?\?\?|={3,}|-{3,}|\|?[\s:|-]+\|?$)")


@dataclass(frozen=True)
class Finding:
    where: str
    text: str
    advice: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text!r}: {self.advice}"


def check_page(page: Path) -> list[Finding]:
    return list(check_markdown(page.read_text(encoding="utf-8"), str(page.relative_to(ROOT))))


def check_markdown(text: str, name: str) -> Iterator[Finding]:
    prose = [
        Line(line.number, _plain(line.text))
        for line in lines_of(without_comments(text))
        if line.language is None
    ]
    for line in prose:
        where = f"{name}:{line.number}"
        yield from _words(line.text, where)
        heading = HEADING.match(line.text)
        if heading and RIDDLE.search(heading[2]):
            yield Finding(where, heading[2], "a heading names its content")
    for number, paragraph in _paragraphs(prose):
        yield from _sentences(paragraph, f"{name}:{number}")


def check_text(text: str, where: str) -> list[Finding]:
    """Check a text of the product: the help of a setting, say."""
    plain = _plain(text)
    return [*_words(plain, where), *_sentences(plain, where)]


def check_product() -> Iterator[Finding]:
    """Check the help of settings and metrics, the chart's comments, and messages in the code."""
    for name in Settings.model_fields:
        yield from check_text(description_of(name), flag_of(name))
    for metric in Metrics().described:
        yield from check_text(metric.text, metric.name)
    for path in (*CHART.rglob("*.yaml"), *CHART.rglob("*.txt")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            yield from _words(_plain(line), f"{path.relative_to(ROOT)}:{number}")
    for half in ("router", "engine_ext"):
        for path in sorted((ROOT / half).rglob("*.py")):
            for number, text in messages_in(path.read_text(encoding="utf-8")):
                yield from _words(text, f"{path.relative_to(ROOT)}:{number}")


def messages_in(source: str) -> Iterator[tuple[int, str]]:
    """Yield the strings of Python code that have a space, without docstrings and without names."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    hidden = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            hidden |= {id(part) for part in ast.walk(node) if part is not node}
        if id(node) in hidden:
            continue
        if isinstance(node, ast.expr) and (text := _literal(node)):
            yield node.lineno, NAME.sub("X", _plain(text))


def _literal(node: ast.expr) -> str:
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    texts = [
        part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "{}"
        for part in parts
    ]
    text = "".join(texts)
    return text if " " in text.strip() else ""


def _plain(line: str) -> str:
    """Replace code and drop what readers do not see."""
    return LINK_TARGET.sub("]", re.sub(r"`[^`]+`", "`X`", line))


def _words(text: str, where: str) -> Iterator[Finding]:
    for pattern, advice in WORDS:
        for match in pattern.finditer(text):
            yield Finding(where, match[0], advice)


def _sentences(paragraph: str, where: str) -> Iterator[Finding]:
    for sentence in END.split(paragraph):
        if (count := len(re.findall(r"\w[\w'/.-]*", sentence))) > MAX_WORDS:
            beginning = " ".join(sentence.split()[:6])
            yield Finding(where, f"{beginning} ...", f"a sentence of {count} words")


def _paragraphs(lines: list[Line]) -> Iterator[tuple[int, str]]:
    """Yield paragraphs and list items, without tables, with the number of their first line."""
    first, parts = 0, list[str]()
    for line in [*lines, Line(0, "")]:
        text = line.text.strip()
        is_item = bool(ITEM.match(line.text))
        is_prose = bool(text) and not text.startswith(("|", "#")) and not REFERENCE.match(text)
        if parts and (is_item or not is_prose):
            yield first, " ".join(parts)
            parts = []
        if is_prose:
            first = first if parts else line.number
            parts.append(ITEM.sub("", line.text).strip())


def main(names: list[str]) -> int:
    findings = [found for page in map(Path, names) for found in check_page(page.resolve())]
    if not names:
        findings = [found for page in pages() for found in check_page(page)]
        findings += check_product()
    print(*findings, sep="\n")
    print(f"{len(findings)} findings")
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
