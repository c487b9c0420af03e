"""Patterns in which * stands for any characters, matched in linear time."""

from __future__ import annotations

from collections.abc import Sequence


def is_match(text: str, pieces: Sequence[str]) -> bool:
    """Return True if `text` is these pieces with any characters between them. The pieces are
    `pattern.split("*")`."""
    first, last = pieces[0], pieces[-1]
    if len(pieces) == 1:
        return text == first
    at, end = len(first), len(text) - len(last)
    if at > end or not text.startswith(first) or not text.endswith(last):
        return False
    for piece in pieces[1:-1]:
        at = text.find(piece, at, end)
        if at < 0:
            return False
        at += len(piece)
    return True
