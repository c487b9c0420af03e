"""State machines as data: for each state and event that may meet, the state after."""

from collections.abc import Mapping
from typing import TypeVar

S = TypeVar("S")
E = TypeVar("E")


class IllegalEventError(Exception):
    """Something was told what cannot happen in its state: a fault of ours."""


def after(transitions: Mapping[tuple[S, E], S], state: S, event: E) -> S:
    """Raises IllegalEventError."""
    try:
        return transitions[state, event]
    except KeyError:
        raise IllegalEventError(f"{event} in {state}") from None
