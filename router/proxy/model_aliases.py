"""Names of models that clients use for models that engines serve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import Any

from router.common.wildcards import is_match
from router.fleet.fleet import Fleet


class ModelAliases:
    """The aliases of the setting model_alias: PATTERN=NAME, where * in a pattern is any text.

    The first pattern that matches counts. The name of a model that an engine serves is never an
    alias, so `*=m` leaves other models as they are.
    """

    def __init__(self, aliases: Sequence[str], fleet: Fleet) -> None:
        pairs = (text.partition("=") for text in aliases)
        self._aliases = [(name, name.split("*"), target) for name, _, target in pairs]
        self._fleet = fleet

    def target_of(self, model: object) -> str | None:
        """Return the name of the model that engines know, or None if `model` is no alias."""
        if not isinstance(model, str) or not model:
            return None
        found = (target for _, pieces, target in self._aliases if is_match(model, pieces))
        target = next(found, None)
        return None if target is None or self._fleet.reports_model(model) else target

    def resolve(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a request's body with the name of the model that engines know."""
        target = self.target_of(body.get("model"))
        return body if target is None else {**body, "model": target}

    def names_for(self, models: Set[str]) -> Iterator[tuple[str, str]]:
        """Yield each alias (a name or a pattern) of these models, with the model's name."""
        for name, _, target in self._aliases:
            if target in models and name not in models:
                yield name, target
