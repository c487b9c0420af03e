"""The counts of scripts/trace_request.py for a sequence of calls."""

from scripts.trace_request import Step, count_returns


def returns_of(files: str) -> int:
    return count_returns([Step(file, "f", False) for file in files])


def test_only_a_step_back_to_a_file_that_was_left_is_a_return() -> None:
    assert returns_of("abc") == 0
    assert returns_of("aabb") == 0
    assert returns_of("aba") == 1
    assert returns_of("ababab") == 4
    assert returns_of("abcacb") == 3
