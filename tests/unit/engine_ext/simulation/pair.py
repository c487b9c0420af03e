"""One prefill and one decode engine, and what a router does between them."""

from typing import Any

from tests.unit.engine_ext.simulation.world import World

LONGEST = 300.0
"""Past every timeout of the default configuration but a registration's."""


def tokens(seed: int, length: int = 10) -> list[int]:
    return [seed * 1000 + position for position in range(length)]


def connected(mode: str, **config: Any) -> "Pair":
    """Return a pair whose engines have met: a request has been served."""
    pair = Pair(mode, **config)
    assert pair.is_served()
    return pair


class Pair:
    """One prefill and one decode engine, and what a router does between them."""

    def __init__(self, mode: str, seed: int = 0, **config: Any) -> None:
        self.mode = mode
        self.world = World(seed)
        settings: dict[str, Any] = {
            "registration_timeout": 60.0,
            "write_bound": 130.0,
            "landing_seconds": 10.0,
            **config,
        }
        self.prefiller = self.world.engine("p", mode, port=1, **settings)
        self.decoder = self.world.engine("d", mode, port=2, **settings)
        self.count = 0

    def ask(self, hurry: bool = False) -> str:
        """Both legs of a request; returns D's id for it. `hurry`: no time passes in between."""
        self.count += 1
        number = self.count
        name = f"cmpl-x{number}-0"
        leg = self.prefiller.prefill(f"{name}-0000000a", tokens(number))
        if self.mode == "push":
            self.decoder.decode(f"{name}-0000000d", tokens(number), self.where(f"x{number}"))
            if not hurry:
                self.world.pass_time(0.1)
            self.prefiller.finish(leg)
        else:
            params = self.prefiller.finish(leg)
            self.decoder.decode(f"{name}-0000000d", tokens(number), params)
        return f"{name}-0000000d"

    def where(self, name: str, **more: Any) -> dict[str, Any]:
        return {
            "do_remote_prefill": True,
            "remote_engine_id": self.prefiller.identity.engine_id,
            "remote_host": "sim",
            "remote_port": self.prefiller.identity.port,
            "remote_request_id": name,
            **more,
        }

    def is_served(self, within: float = 30.0) -> bool:
        asked = self.ask()
        self.world.until(lambda: asked in self.decoder.outcomes, within)
        return self.decoder.outcomes[asked]

    def assert_all_ended(self) -> None:
        self.world.pass_time(LONGEST)
        self.prefiller.assert_empty()
        self.decoder.assert_empty()
