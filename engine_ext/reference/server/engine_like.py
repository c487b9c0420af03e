"""What the server needs of an engine."""

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from engine_ext.common.inspection import Inspection
from engine_ext.common.types import ConnectorStats
from engine_ext.reference.beginning import Beginning
from engine_ext.reference.messages import EngineStats, GenerateRequest, RequestOutput


class EngineLike(Protocol):
    @property
    def is_healthy(self) -> bool:
        """False for good once the engine can make no more tokens."""

    def generate(
        self, request: GenerateRequest, begun: Beginning | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """What the request adds, piece by piece; the last piece has a finish reason. Where it has
        `begun` elsewhere, what is not spoken yet is the first piece.

        Closing or cancelling the iterator aborts the request.
        """

    def decline(self, params: dict[str, Any]) -> None:
        """A request with these `kv_transfer_params` was refused: a remote may hold blocks for it.
        Returns at once."""

    def abort(self, request_id: str) -> None:
        """Its answer reaches nobody: what it keeps for a remote, if it has ended, is given up."""

    async def release(self, engine_id: str, request_id: str) -> bool:
        """No remote will read this request's KV. True: it was held."""

    def stats(self) -> EngineStats: ...
    def connector_stats(self) -> ConnectorStats: ...
    def inspect(self, asked: str | None = None) -> Inspection | None:
        """What is held for other engines, of one request or of all; None without a connector.
        Blocks for a second at most; raises TimeoutError."""
