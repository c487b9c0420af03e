"""Puts an engine to the test: does it know `cache_hit_threshold`?

Of a prompt of one token no cache holds anything, for its last token is always computed. An engine
that is asked for all of it rejects, if it knows the field; else it answers, after next to no work.
"""

from __future__ import annotations

from router.fleet.engine import Engine
from router.http_client.errors import UpstreamError
from router.openai.answers import Json, choices_of, parse_object
from router.proxy.request import COMPLETIONS, THRESHOLD, Request
from router.proxy.side_request import smallest, tell

REJECTION = "cache_threshold"


async def try_threshold(request: Request, engine: Engine) -> None:
    """Notes a rejection. Never raises."""
    body = {**smallest(request.model), THRESHOLD: 1}
    try:
        told = await tell(request, engine, COMPLETIONS, body, "trial")
    except UpstreamError:
        return
    answer = parse_object(told.body) if told.status == 200 else None
    if answer is not None and is_rejection(answer):
        engine.capabilities.note_threshold_rejected()


def is_rejection(content: Json) -> bool:
    """Of an answer or a chunk: whether an engine says by it that its cache holds too little."""
    return any(
        REJECTION in (choice.get("finish_reason"), choice.get("stop_reason"))
        for choice in choices_of(content)
    )
