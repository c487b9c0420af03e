"""Stops a request that crashes engines before it reaches the whole fleet.

Some requests crash the engine process: a body that trips an assertion, a prompt that exhausts its
memory. Retried on one engine after another, such a request would crash all of them. So after two
legs have failed in a way that may be a crash, the router probes both engines. If both are down, the
request ends with an error that tells clients not to retry.

A failed leg alone is not a crash: engines also return 5xx, restart, and lose connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from router.fleet.engine import Engine, Health
from router.fleet.engine_spec import Intent
from router.http_client.deadlines import now
from router.http_client.errors import (
    ConnectRefusedError,
    ConnectTimeoutError,
    DisconnectedError,
    UpstreamError,
)
from router.openai.errors import EngineUnavailableError, RepeatedCrashError

# Engines that may die during one request.
MAX_DEATHS = 2
# Timeout of the probe, in seconds, the connection included.
PATIENCE = 1.0
LONGEST_ANSWER = 64 * 1024
# Failures of a leg that may be the death of its engine: see router.proxy.retry.RULES.
SUSPICIOUS = frozenset(("stale", "disconnected", "engine_lost", "broken_answer", "status_5xx"))


def is_suspicious(kind: str, error: Exception) -> bool:
    """Return True if the engine may have crashed. An engine that reports a shutdown has not."""
    return kind in SUSPICIOUS and not isinstance(error, EngineUnavailableError)


async def require_few_deaths(suspects: Mapping[Engine, float]) -> None:
    """Raises RepeatedCrashError when MAX_DEATHS of these engines are dead. `suspects`: when each
    of them failed, in Unix time."""
    died = await asyncio.gather(*[_has_died(engine, at) for engine, at in suspects.items()])
    if sum(died) >= MAX_DEATHS:
        raise RepeatedCrashError(
            f"{sum(died)} engines died while they worked on this request, so no other one is "
            "asked; sending it again may end more of them"
        )


async def _has_died(engine: Engine, suspected_at: float) -> bool:
    if engine.intent is not Intent.SERVING:
        return False  # it was to leave
    if engine.health is Health.UNHEALTHY or engine.lost_at >= suspected_at:
        return True
    try:
        told = await engine.get("/health", now() + PATIENCE, LONGEST_ANSWER)
    except (ConnectRefusedError, ConnectTimeoutError, DisconnectedError):
        return True
    except UpstreamError:
        return False  # busy, perhaps
    return told.status >= 500
