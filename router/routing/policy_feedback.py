"""What one request tells a policy that remembers: whom it was sent to, and what they had."""

from __future__ import annotations

from router.routing.candidate import Policy, RoutingQuery


class PolicyFeedback:
    """Every engine that was sent the prompt is told of once more, at the latest by `end`."""

    __slots__ = ("_ask", "_policy", "_sent")

    def __init__(self, policy: Policy, ask: RoutingQuery) -> None:
        self._policy = policy
        self._ask = ask
        self._sent: list[str] = []

    def expected_tokens(self, name: str) -> int:
        """Tokens of the prompt that the engine is believed to hold."""
        return self._policy.expected_tokens(name, self._ask)

    def sent(self, name: str) -> None:
        if name not in self._sent:
            self._sent.append(name)
            self._policy.note_sent(name, self._ask)

    def answered(self, name: str, cached_tokens: int | None) -> None:
        """It holds the prompt now; None: it did not tell how much of it it had before."""
        if name in self._sent:
            self._sent.remove(name)
            self._policy.note_cached(name, self._ask, cached_tokens)

    def end(self) -> None:
        while self._sent:
            self.answered(self._sent[-1], None)
