"""Frees a prefiller's blocks that no decoder will read, long before their lease ends.

A decoder that has the request frees them itself when the request is aborted. But the client may
leave, or the decoder fail, before the decoder has it: then a small request tells one on purpose.
Our decoders find that it shares nothing with the prefilled prompt and tell the prefiller at once.
Stock vLLM would read; so it is asked for a model that nobody serves, and when it rejects a request
with kv_transfer_params it tells the prefiller too (vllm#41269). Told twice is told once.

A decoder that keeps a turn which nobody will pull is told so itself, if it has an ear for that.
"""

from __future__ import annotations

import asyncio

from router.fleet.engine import Engine, Role
from router.flows import headers, legs
from router.flows.gateway import Gateway
from router.flows.request import Request, write_body
from router.upstream.deadlines import now
from router.upstream.errors import UpstreamError

TIMEOUT = 5.0
# Seconds after which a decoder has read, tokenized and queued a request, even under load.
ARRIVED = 5.0
ENDPOINT = "/v1/completions"
TURN_ENDPOINT = "/disagg/release"
NO_MODEL = "disagg-router/released"
ANSWER_LIMIT = 1024 * 1024


def give_up(
    request: Request, gateway: Gateway, params: legs.Body | None, cause: BaseException
) -> None:
    """A decode leg failed or was left; before its first byte, the prefiller still waits."""
    if params is None or request.record.first_byte is not None:
        return
    if not (isinstance(cause, asyncio.CancelledError) and _has_arrived(request)):
        gateway.spawn(release(request, gateway, params))


def _has_arrived(request: Request) -> bool:
    """Whether the decoder surely has the leg, so that its abort releases the prefiller."""
    started = request.record.decode_started
    return started is not None and now() - started > ARRIVED


async def release(request: Request, gateway: Gateway, params: legs.Body) -> None:
    """Tells the prefiller, through a decoder, that nobody will read. Never raises."""
    decoder = _decoder(request, gateway)
    if decoder is None:
        gateway.metrics.releases.labels("no_decoder").inc()
        return
    await _tell(request, gateway, decoder, ENDPOINT, _body(request.body, params))


def give_up_turn(request: Request, gateway: Gateway, decoder: Engine, params: legs.Body) -> None:
    """The last turn's KV was taken from the store and is not pulled: free it before its time."""
    decoder.learned.wanted = True
    if decoder.learned.releases:
        body = {legs.KV_PARAMS: params}
        gateway.spawn(_tell(request, gateway, decoder, TURN_ENDPOINT, body))


async def _tell(
    request: Request, gateway: Gateway, decoder: Engine, endpoint: str, body: legs.Body
) -> None:
    try:
        status = await _ask(request, decoder, endpoint, write_body(body))
    except UpstreamError as error:
        gateway.throttle.warn("KV could not be released", f"{decoder.name}: {error}")
        status = 0
    gateway.metrics.releases.labels("done" if 200 <= status < 500 else "failed").inc()


def _decoder(request: Request, gateway: Gateway) -> Engine | None:
    """The one that was asked, which knows the prefiller already; else any."""
    name = request.record.decoder
    candidates = gateway.fleet.candidates(Role.DECODE)
    return gateway.fleet.named(Role.DECODE, name) or next(iter(candidates), None)


def _body(body: legs.Body, params: legs.Body) -> legs.Body:
    ours = "prefix_proof" in params
    model = body.get("model") if ours else NO_MODEL
    leg: legs.Body = {"prompt": [1], "max_tokens": 1, "stream": False, legs.KV_PARAMS: params}
    return leg if model is None else {"model": model, **leg}


async def _ask(request: Request, decoder: Engine, endpoint: str, content: bytes) -> int:
    leg_id = f"{request.leg_id}-release"
    shared = request.shared_headers
    message = headers.message(endpoint, decoder.name, leg_id, shared, content)
    answer = await decoder.pool.ask(message, now() + TIMEOUT)
    try:
        await answer.read(ANSWER_LIMIT)
    finally:
        answer.close()
    return answer.status
