"""Records whether engines tokenize prompts for `POST /tokenize` as they render them for an answer.

`proxy.turn_tokens` finds it out, by the shape of prompts. No I/O.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from msgspec import Struct

from router.fleet.capabilities import EngineCapabilities
from router.fleet.engine import Engine

MAX_SHAPES = 1024


class TokenProof(Struct, eq=False):
    """Records whether one engine process tokenizes the prompts of one shape as it renders them.

    `capabilities` identify the process: the fleet replaces them when the engine is lost.
    """

    engine: Engine
    capabilities: EngineCapabilities
    task: asyncio.Task[None] | None = None
    is_equal: bool = False
    is_known: bool = True
    """False if the engine did not tokenize; the next prompt of the shape tries again."""

    @property
    def is_valid(self) -> bool:
        return (
            self.is_known
            and self.engine.capabilities is self.capabilities
            and self.engine.is_usable
        )


class TokenProofs:
    """The shapes of prompts whose ids from /tokenize are known to be right or wrong, by group."""

    def __init__(self) -> None:
        self._proofs: OrderedDict[tuple[str, str], TokenProof] = OrderedDict()

    def find(self, group: str, shape: str) -> TokenProof | None:
        """Return what is known of a shape, from an engine that still runs."""
        proof = self._proofs.get((group, shape))
        return proof if proof is not None and proof.is_valid else None

    def add(self, group: str, shape: str, proof: TokenProof) -> None:
        self._proofs[group, shape] = proof
        if len(self._proofs) > MAX_SHAPES:
            self._proofs.popitem(last=False)
