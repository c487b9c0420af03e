"""The endpoints that flows serve, as both fronts know them."""

from __future__ import annotations

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HOT = {path.encode(): path for path in (CHAT, COMPLETIONS)}
