"""A small request of the router's own, beside a client's and with its headers."""

from __future__ import annotations

from router.fleet.engine import Engine
from router.http_client.deadlines import now
from router.http_client.pool import CompleteAnswer
from router.proxy import headers
from router.proxy.leg_bodies import encode_body
from router.proxy.request import Body, Request

TIMEOUT = 5.0
ANSWER_LIMIT = 1024 * 1024


async def tell(request: Request, engine: Engine, path: str, body: Body, why: str) -> CompleteAnswer:
    """`why` ends its X-Request-Id. Raises UpstreamError."""
    content = encode_body(body)
    leg_id = f"{request.leg_id()}-{why}"
    message = headers.leg_message(path, engine.name, leg_id, request.shared_headers, (content, b""))
    return await engine.pool.fetch(message, now() + TIMEOUT, ANSWER_LIMIT)


def smallest(model: object) -> Body:
    """A completion of one token after one token."""
    body: Body = {"prompt": [1], "max_tokens": 1, "stream": False}
    return body if model is None else {"model": model, **body}
