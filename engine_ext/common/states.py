"""State machines as data: a table gives the next state for each state and event that may meet."""

from collections.abc import Mapping
from typing import TypeVar

S = TypeVar("S")
E = TypeVar("E")


class IllegalEventError(Exception):
    """An event that cannot happen in this state: a programming error."""


def after(transitions: Mapping[tuple[S, E], S], state: S, event: E) -> S:
    """Return the next state. Raises IllegalEventError."""
    try:
        return transitions[state, event]
    except KeyError:
        raise IllegalEventError(f"{event} in {state}") from None
