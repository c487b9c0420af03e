"""The policies of one role: one object for each group, made when it is first needed."""

from __future__ import annotations

from collections.abc import Container

from router.routing.affinity import LoadBound
from router.routing.candidate import Policy
from router.routing.policy_registry import make_policy


class GroupPolicies(dict[str, Policy]):
    """By group. KV moves only within one, so nothing is to be known across them."""

    def __init__(self, name: str, bound: LoadBound) -> None:
        """Raises UnknownPolicyError."""
        super().__init__()
        self._name = name
        self._bound = bound
        self.uses_feedback = make_policy(name, bound).uses_feedback

    def __missing__(self, group: str) -> Policy:
        policy = self[group] = make_policy(self._name, self._bound)
        return policy

    def forget(self, engine: str, group: str) -> None:
        """It is gone, or has begun anew."""
        if group in self:
            self[group].forget(engine)

    def keep_only(self, groups: Container[str]) -> None:
        """All other groups are gone."""
        for group in [group for group in self if group not in groups]:
            del self[group]
