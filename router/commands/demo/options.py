"""What the demo was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Options:
    prefillers: int
    decoders: int
    host: str
    port: int
    device: str
    model: Path | str | None
    """A directory, "tiny", or None for the chat model."""
    vllm: bool

    @property
    def url(self) -> str:
        host = "localhost" if self.host in ("127.0.0.1", "0.0.0.0") else self.host
        return f"http://{host}:{self.port}"
