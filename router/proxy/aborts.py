"""Requests of token ids that a client ends by their ids, as at vLLM's abort_requests.

The ids of legs are the router's own, so it ends the request itself: its engines see a client that
has disconnected. The request is answered as vLLM answers one that was aborted before it had a
token: 200 and finish_reason `abort`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from router.auth.api_keys import ApiKey, read_key
from router.common.exact_json import dumps
from router.proxy import messages
from router.proxy.exchange import Header
from router.proxy.request import MAX_SHARED_ANSWERS, Body, Request

# vLLM writes it before the id that it gets.
ENGINE_PREFIX = "generate-tokens-"


class _Running(NamedTuple):
    ids: frozenset[str]
    owner: object


class AbortableRequests:
    """The running requests that clients may end by their ids. `aborted` are the tasks of those that
    have not yet ended after that."""

    def __init__(self) -> None:
        self._running: dict[asyncio.Task[None], _Running] = {}
        self.aborted: set[asyncio.Task[None]] = set()

    def add(self, request: Request) -> None:
        """Add the request of the current task. Its id is the client's X-Request-Id, else the body's
        request_id, as in vLLM; the router's own id, which the client gets, holds as well."""
        exchange, ids = request.exchange, {request.record.request_id}
        named = request.body.get("request_id")
        if isinstance(named, str) and messages.REQUEST_ID not in dict(exchange.headers):
            ids.add(named)
        task = asyncio.current_task(exchange.loop)
        assert task is not None
        owner = _owner(exchange.caller, exchange.headers)
        self._running[task] = _Running(frozenset(ids), owner)
        task.add_done_callback(self._forget)

    def abort(self, given: Iterable[str], caller: ApiKey | None, headers: Sequence[Header]) -> None:
        """End the requests with these ids and the same API key. Ids may be those of engines."""
        ids = {messages.client_id_of(one.removeprefix(ENGINE_PREFIX)) for one in given}
        owner = _owner(caller, headers)
        for task, one in self._running.items():
            if one.owner == owner and not one.ids.isdisjoint(ids):
                self.aborted.add(task)
                task.cancel()

    def _forget(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        self.aborted.discard(task)


def _owner(caller: ApiKey | None, headers: Sequence[Header]) -> object:
    return read_key(headers) if caller is None else caller.name


async def answer_aborted(request: Request) -> None:
    """End the answer of an aborted request. Tokens that engines had generated are lost, but for
    those that were streamed."""
    record, exchange, body = request.record, request.exchange, request.body
    mode = "text" if body.get("output_mode") == "text" else "tokens"
    ended: Body = {"finish_reason": "abort", "stop_reason": None, "logprobs": None, "token_ids": []}
    if mode == "text":
        ended["text"] = ""
    several = body["sampling_params"].get("n")
    count = several if isinstance(several, int) and 0 < several <= MAX_SHARED_ANSWERS else 1
    choices = [{"index": index, **ended} for index in range(count)]
    request_id = f"{ENGINE_PREFIX}{record.request_id}"
    answer = dumps({"request_id": request_id, "output_mode": mode, "choices": choices})
    is_stream = body.get("stream") is True
    if is_stream:
        answer = b"data: %s\n\ndata: [DONE]\n\n" % answer
    if not exchange.started:
        kind = messages.EVENT_STREAM_TYPE if is_stream else b"application/json"
        headers = messages.to_client([(b"content-type", kind)], record.request_id, is_stream)
        await exchange.respond(200, headers, answer)
    elif is_stream:
        await exchange.finish(answer)
    else:
        exchange.abort()
