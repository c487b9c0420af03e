"""Methods of vLLM's that are wrapped where they are, once."""

from collections.abc import Callable
from typing import Any

MARK = "_disagg_seam"


def wrap(owner: type, name: str, wrapping: Callable[[Any], Any]) -> None:
    """Idempotent. A class that does not define the method itself is left alone."""
    original = vars(owner).get(name)
    if original is not None and not hasattr(original, MARK):
        wrapper = wrapping(original)
        setattr(wrapper, MARK, True)
        setattr(owner, name, wrapper)
