"""What one process remembers of ids is bounded, and forgets the oldest."""

from typing import Any

from router.conversations.conversations import (
    MAX_SESSIONS,
    MAX_SOURCES,
    MAX_TURNS,
    RecentSessions,
    ReturnTracker,
)
from router.conversations.entry import Prompt, prompt_of


def prompt(*contents: str) -> Prompt:
    """A chat in which user and assistant take turns."""
    messages: list[dict[str, Any]] = [
        {"role": ("user", "assistant")[number % 2], "content": content}
        for number, content in enumerate(contents)
    ]
    found = prompt_of({"messages": messages})
    assert found is not None
    return found


def test_the_oldest_id_is_forgotten_first() -> None:
    recent = RecentSessions()
    for number in range(MAX_SESSIONS + 1):
        assert not recent.note_request(str(number))
        recent.add(str(number), f"key-{number}", prompt("hello"))
    assert recent.note_request("1")
    assert not recent.note_request("0")
    assert recent.find_other("1", prompt("hello")) == "key-1"
    assert recent.find_other("0", prompt("hello")) is None


def test_the_last_turns_of_an_id_are_known() -> None:
    recent = RecentSessions()
    recent.note_request("c")
    for number in range(MAX_TURNS + 1):
        recent.add("c", f"key-{number}", prompt(f"hello {number}"))
    found = [recent.find_other("c", prompt(f"hello {number}")) for number in range(MAX_TURNS + 1)]
    assert found == [None, *(f"key-{number}" for number in range(1, MAX_TURNS + 1))]
    recent.forget("c", "key-1")
    assert recent.find_other("c", prompt("hello 1")) is None


def test_an_edited_history_changes_the_turn_of_which_it_repeats_at_least_half() -> None:
    recent = RecentSessions()
    recent.note_request("c")
    recent.add("c", "long", prompt("a", "b", "c", "d", "e"))
    recent.add("c", "title", prompt("title"))
    assert recent.find_other("c", prompt("a", "b", "c", "d", "edited")) == "long"
    assert recent.find_other("c", prompt("a", "b", "c", "edited", "e")) == "long"
    assert recent.find_other("c", prompt("other", "b", "c", "d", "e")) is None
    assert recent.find_other("c", prompt("another")) is None
    assert recent.find_other("c", prompt("a")) is None, "another chat may begin like this"
    assert recent.find_other("d", prompt("a", "b", "c", "d", "edited")) is None


def test_the_number_of_sources_is_bounded() -> None:
    returns = ReturnTracker()
    for number in range(MAX_SOURCES + 1):
        returns.note_new(number)
    assert returns.may_return(0, 1), "it was forgotten"
    assert not returns.may_return(1, 1)
    returns.note_return(1)
    assert returns.may_return(1, 1)
