"""Lines that change with each request are removed from system texts."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.openai.changing_lines import MAX_LINES, without_changing_lines


@pytest.mark.parametrize(
    ("pattern", "line", "is_removed"),
    [
        ("a", "a", True),
        ("a", "ab", False),
        ("a*", "ab", True),
        ("a*", "ba", False),
        ("a*b", "ab", True),
        ("a*a", "a", False),
        ("a*b*c", "a-b-c", True),
        ("a*b*b", "ab", False),
        ("a*bc*c", "abc", False),
        ("a.*", "ab", False),
        ("a**b", "axb", True),
    ],
)
def test_stars_stand_for_any_characters(pattern: str, line: str, is_removed: bool) -> None:
    kept = "rest" if is_removed else f"{line}\nrest"
    assert without_changing_lines(f"{line}\nrest", ["no", pattern]) == kept


def test_several_first_lines_are_removed_up_to_a_bound() -> None:
    assert without_changing_lines("a1\n\nb2\n\nc\na3", ["a*", "b*"]) == "c\na3"
    assert without_changing_lines("a\n" * (MAX_LINES + 2), ["a"]) == "a\na\n"
    assert without_changing_lines("a", ["a"]) == ""
    assert without_changing_lines("a", []) == "a"


@given(st.from_regex("[ab][ab*]{0,6}", fullmatch=True), st.text("ab", max_size=8))
def test_patterns_match_as_the_same_expression_would(pattern: str, line: str) -> None:
    expression = ".*".join(map(re.escape, pattern.split("*")))
    kept = without_changing_lines(f"{line}\nrest", [pattern])
    assert (kept == "rest") == (re.fullmatch(expression, line) is not None)
