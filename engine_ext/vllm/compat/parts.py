"""Our scheduler class is made of what fits; where a feature is off, vLLM's own methods are."""

from collections.abc import Callable
from typing import Any, TypeVar

from engine_ext.vllm.compat import support
from engine_ext.vllm.compat.features import Feature

H = TypeVar("H", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

MARK = "_disagg_features"


def part_of(*features: Feature) -> Callable[[H], H]:
    """A method that overrides vLLM's for the sake of one of `features`, or of several."""

    def mark(method: H) -> H:
        setattr(method, MARK, features)
        return method

    return mark


def fitted(cls: C) -> C:
    """Without the overrides that nothing is on for."""
    for name, method in list(vars(cls).items()):
        features = getattr(method, MARK, None)
        if features is not None and not any(map(support.is_on, features)):
            delattr(cls, name)
    return cls
