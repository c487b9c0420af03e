"""Suggests the name that a person may have meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return "; did you mean NAME?" for the name closest to `word`, or "" if none is close."""
    found = get_close_matches(word[:100], list(names), n=1, cutoff=0.65)
    return f"; did you mean {found[0]}?" if found else ""
