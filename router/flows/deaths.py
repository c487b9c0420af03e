"""A request that kills engines must not go through the whole fleet.

Some requests end the engine process that works on them: a body that trips an assertion, a prompt
that runs it out of memory. Sent to the next engine each time, such a request takes down all of
them. So before an engine is asked after two have failed, those two are asked whether they live;
where both are dead the request ends with an error that tells clients not to send it again.

A failure alone is no death: engines answer 5xx, are restarted with notice, and lose connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from router.fleet.engine import Engine, Health
from router.fleet.spec import Intent
from router.flows.errors import EnginesDiedError, EngineUnavailableError
from router.upstream.deadlines import now
from router.upstream.errors import (
    ConnectRefusedError,
    ConnectTimeoutError,
    DisconnectedError,
    UpstreamError,
)

# Engines that may die during one request.
MOST_DEATHS = 2
# Seconds that an engine has to say that it lives; the same for a connection to its host.
PATIENCE = 1.0
LONGEST_ANSWER = 64 * 1024
# Failures of a leg that may be the death of its engine: see router.flows.attempts.RULES.
SUSPICIOUS = frozenset(("stale", "disconnected", "engine_lost", "broken_answer", "status_5xx"))


def is_suspicious(kind: str, error: Exception) -> bool:
    """Whether the engine may have died. One that says that it is being stopped has not."""
    return kind in SUSPICIOUS and not isinstance(error, EngineUnavailableError)


async def require_few(suspects: Mapping[Engine, float]) -> None:
    """Raises EnginesDiedError when MOST_DEATHS of these engines are dead. `suspects`: when each of
    them failed, in Unix time."""
    died = await asyncio.gather(*[_has_died(engine, at) for engine, at in suspects.items()])
    if sum(died) >= MOST_DEATHS:
        raise EnginesDiedError(
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
