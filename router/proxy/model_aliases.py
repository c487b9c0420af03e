"""Names of models that clients use for models that engines serve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import Any

from router.auth.api_keys import ApiKey
from router.common.wildcards import is_match
from router.fleet.fleet import Fleet
from router.openai.errors import BadRequestError, NoModelError


class ModelAliases:
    """The aliases of the setting model_alias: PATTERN=NAME, where * in a pattern is any text.

    The first pattern that matches counts. The name of a model that an engine serves is never an
    alias, so `*=m` leaves other models as they are. A request without a name is for the only model
    that engines serve.
    """

    def __init__(self, aliases: Sequence[str], fleet: Fleet) -> None:
        pairs = (text.partition("=") for text in aliases)
        self._aliases = [(name, name.split("*"), target) for name, _, target in pairs]
        self._fleet = fleet

    def target_of(self, model: object) -> str | None:
        """Return the name of the model that engines know, or None if `model` is no alias."""
        if not self._aliases or not isinstance(model, str) or not model:
            return None
        found = (target for _, pieces, target in self._aliases if is_match(model, pieces))
        target = next(found, None)
        return None if target is None or self._fleet.reports_model(model) else target

    def resolve(self, body: dict[str, Any], caller: ApiKey | None = None) -> dict[str, Any]:
        """Return a request's body with the name of the model that engines know.

        Each leg of a request names its model: without the name, one engine could compute the prompt
        with another model than the one that writes the answer. Only if no engine's models are
        known, a request may lack it. Raises BadRequestError, NoModelError.
        """
        model = body.get("model")
        if model is None or model == "":
            target = self._default_for(caller)
        elif isinstance(model, str):
            target = self.target_of(model)
        else:
            raise BadRequestError("model must be a string", "model")
        return body if target is None else {**body, "model": target}

    def names_for(self, models: Set[str]) -> Iterator[tuple[str, str]]:
        """Yield each alias (a name or a pattern) of these models, with the model's name."""
        for name, _, target in self._aliases:
            if target in models and name not in models:
                yield name, target

    def served(self, caller: ApiKey | None) -> list[str]:
        """Return the names of the models that engines serve and that the caller may use."""
        models = self._fleet.snapshot.by_model
        found = [name for name in models if caller is None or caller.allows_model(name)]
        return found + [alias for alias, _ in self.names_for({*found})]

    def _default_for(self, caller: ApiKey | None) -> str | None:
        """Return the only model, or None if no model is known, or the caller may not use it."""
        default = self._fleet.snapshot.default_model
        if default == "":
            raise NoModelError(self.served(caller))
        return default if caller is None or caller.allows_model(default) else None
