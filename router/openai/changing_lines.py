"""Remove the lines of a system prompt that change with each request. Pure.

Claude Code begins its system prompt with `x-anthropic-billing-header: ...; cch=f3a1c;`, in which
`cch` is new each time. Nothing that follows such a line can be found in a cache of prefixes.
"""

from __future__ import annotations

from collections.abc import Sequence

# How many lines are removed from the beginning of a text at most.
MAX_LINES = 8


def without_changing_lines(text: str, patterns: Sequence[str]) -> str:
    """Return `text` without its first lines that match one of `patterns`.

    In a pattern `*` stands for any characters. The time is linear in the length of the text.
    """
    for _ in range(MAX_LINES):
        line, newline, rest = text.partition("\n")
        line = line.strip()
        if not any(_matches(line, pattern.split("*")) for pattern in patterns):
            return text
        text = rest.lstrip("\r\n")
        if not newline:
            break
    return text


def _matches(line: str, pieces: list[str]) -> bool:
    """Return True if the line consists of the pieces with any characters between them."""
    first, last = pieces[0], pieces[-1]
    if len(pieces) == 1:
        return line == first
    if len(line) < len(first) + len(last) or not line.startswith(first) or not line.endswith(last):
        return False
    at, end = len(first), len(line) - len(last)
    for piece in pieces[1:-1]:
        at = line.find(piece, at, end)
        if at < 0:
            return False
        at += len(piece)
    return True
