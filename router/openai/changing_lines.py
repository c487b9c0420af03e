"""Remove the lines of a system prompt that change with each request. Pure.

Claude Code begins its system prompt with `x-anthropic-billing-header: ...; cch=f3a1c;`, in which
`cch` is new each time. Nothing that follows such a line can be found in a cache of prefixes.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.common.wildcards import is_match

# How many lines are removed from the beginning of a text at most.
MAX_LINES = 8


def without_changing_lines(text: str, patterns: Sequence[str]) -> str:
    """Return `text` without its first lines that match one of `patterns`.

    In a pattern `*` stands for any characters. The time is linear in the length of the text.
    """
    for _ in range(MAX_LINES):
        line, newline, rest = text.partition("\n")
        line = line.strip()
        if not any(is_match(line, pattern.split("*")) for pattern in patterns):
            return text
        text = rest.lstrip("\r\n")
        if not newline:
            break
    return text
