"""Methods of vLLM's that are wrapped where they are, once."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

Host: Any = object
"""The base of a part of our scheduler class: vLLM's Scheduler comes behind it."""

MARK = "_disagg_patch"


def wrap(owner: type | ModuleType, name: str, wrapping: Callable[[Any], Any]) -> None:
    """Replace a method by `wrapping(method)`. Idempotent. A class that does not define the method
    itself is left alone."""
    original = vars(owner).get(name)
    if original is not None and not hasattr(original, MARK):
        wrapper = functools.wraps(original)(wrapping(original))
        setattr(wrapper, MARK, True)
        setattr(owner, name, wrapper)


def wrap_in(module: ModuleType, name: str, wrapping: Callable[[Any], Any]) -> None:
    """Wrap the method in each class of a module that defines it. Idempotent."""
    for owner in vars(module).values():
        if isinstance(owner, type):
            wrap(owner, name, wrapping)
