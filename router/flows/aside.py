"""A small request of the router's own, beside a client's and with its headers."""

from __future__ import annotations

from typing import NamedTuple

from router.fleet.engine import Engine
from router.flows import headers
from router.flows.legs import write
from router.flows.request import Body, Request
from router.upstream.deadlines import now

TIMEOUT = 5.0
ANSWER_LIMIT = 1024 * 1024
COMPLETIONS = "/v1/completions"


class Told(NamedTuple):
    status: int
    content: bytes


async def tell(request: Request, engine: Engine, path: str, body: Body, why: str) -> Told:
    """`why` ends its X-Request-Id. Raises UpstreamError."""
    content = write(body)
    leg_id = f"{request.leg_id()}-{why}"
    message = headers.message(path, engine.name, leg_id, request.shared_headers, content)
    answer = await engine.pool.ask(message, now() + TIMEOUT)
    try:
        return Told(answer.status, await answer.read(ANSWER_LIMIT))
    finally:
        answer.close()


def smallest(model: object) -> Body:
    """A completion of one token after one token."""
    body: Body = {"prompt": [1], "max_tokens": 1, "stream": False}
    return body if model is None else {"model": model, **body}
