"""Hooks of the connector let nothing out: an exception would end vLLM's engine."""

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

logger = logging.getLogger(__name__)

H = TypeVar("H", bound=Callable[..., Any])


def guarded(
    fallback: Callable[[], Any], otherwise: Callable[..., Any] | None = None
) -> Callable[[H], H]:
    """Log what a hook raises. Then return what `otherwise` returns, which gets the same arguments
    and repairs what may be half done; `fallback()`, a new value for every call, if there is none or
    it raises too."""

    def decorate(hook: H) -> H:
        @functools.wraps(hook)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return hook(*args, **kwargs)
            except Exception:
                logger.exception("KV connector: %s", hook.__name__)
            if otherwise is not None:
                try:
                    return otherwise(*args, **kwargs)
                except Exception:
                    logger.exception("KV connector: %s", hook.__name__)
            return fallback()

        return cast(H, call)

    return decorate


def guarded_step(fallback: Callable[[], Any]) -> Callable[[H], H]:
    """As `guarded`, for a hook of one argument that vLLM calls in every step: packing arguments
    takes as long as such a hook."""

    def decorate(hook: H) -> H:
        @functools.wraps(hook)
        def call(self: Any, output: Any) -> Any:
            try:
                return hook(self, output)
            except Exception:
                logger.exception("KV connector: %s", hook.__name__)
            return fallback()

        return cast(H, call)

    return decorate


def nothing() -> None:
    """The fallback of a hook that returns nothing."""
