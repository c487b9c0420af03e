"""Releases KV that no engine will read, long before its lease ends.

If a decode engine has the request and aborts it, the decode engine releases the blocks of the
prefill engine itself. But the client may disconnect, or the decode engine fail, before the decode
engine has the request. Then the router releases the blocks:

1. A prefill engine with engine_ext has an endpoint for this. No decode engine is needed, which may
   be the one that has failed.
2. Otherwise a decode engine gets a small request with the params. If the params contain prefix
   hashes, the decode engine finds that its prompt shares no prefix with the blocks, and releases
   them at once. Without hashes it would read the blocks, so the request names a model that no
   engine serves: an engine that rejects a request with kv_transfer_params releases the blocks too
   (vllm#41269).

A second release of the same blocks has no effect. Retained KV of a turn that no prefill engine will
read is released by the same endpoint of the decode engine.
"""

from __future__ import annotations

import asyncio

from router.conversations.entry import Entry
from router.fleet.engine import Engine, EngineRole
from router.http_client.answer_memory import Reservation
from router.http_client.deadlines import now
from router.http_client.engine_answer import EngineAnswer
from router.http_client.errors import UpstreamError
from router.openai.event_stream import chunks_in
from router.proxy.gateway import Gateway
from router.proxy.prefill_answer import KvParams, PrefillAnswer
from router.proxy.request import COMPLETIONS, KV_PARAMS, Body, Request
from router.proxy.run import Run
from router.proxy.side_requests import one_token_body, send_side_request

# Seconds that a cancelled leg may take to return an answer that its engine had finished by then.
LATE_ANSWER_TIMEOUT_S = 1.0
# Seconds after which a decode engine has read, tokenized and queued a leg, even under load.
LEG_ARRIVAL_TIME_S = 5.0
RELEASE_PATH = "/disagg/release"
RELEASE_MODEL = "disagg-router/released"


def release_unread(run: Run, params: KvParams | None, cause: BaseException | None) -> None:
    """Release the prefill engine's KV, unless a decode engine has read it.

    `cause` is what ended the decode leg, if something has.
    """
    if params is None or _was_read(run, params):
        return
    request, gateway = run.request, run.gateway
    if not (isinstance(cause, asyncio.CancelledError) and _has_leg_arrived(request)):
        gateway.tasks.spawn(release_prefill(request, gateway, request.record.prefiller, params))


def _was_read(run: Run, params: KvParams) -> bool:
    """Return True if the decode engine has certainly read the KV.

    The first byte of an answer shows that. With a hand-over of the first token, the second token
    shows it, because the decode engine sends the first one before it has any KV. If the tokens are
    not counted, return False: the prefill engine knows whether its blocks were read.
    """
    if run.request.record.first_byte is None:
        return False
    buffer = run.resume.buffer
    return not params.continues_tokens or (buffer is not None and buffer.num_tokens > 1)


def _has_leg_arrived(request: Request) -> bool:
    """Return True if the decode engine has the leg, so that its abort releases the blocks."""
    started = request.record.decode_started
    return started is not None and now() - started > LEG_ARRIVAL_TIME_S


async def release_late_prefill(request: Request, gateway: Gateway, answer: EngineAnswer) -> None:
    """End a prefill leg whose client has disconnected, and release its blocks if the engine had
    finished by then. Never raises an UpstreamError."""
    try:
        raw = await _read_late_answer(gateway, answer)
        params = PrefillAnswer(raw).params if answer.status == 200 else None
    except (TimeoutError, UpstreamError):
        return
    if params is not None:
        await release_prefill(request, gateway, request.record.prefiller, params)


async def release_late_turn(
    request: Request, gateway: Gateway, engine: Engine, answer: EngineAnswer
) -> None:
    """End a hedged decode leg of a turn that another leg has won, and release its retained KV if
    the engine had finished by then. Never raises an UpstreamError."""
    try:
        raw = await _read_late_answer(gateway, answer)
    except (TimeoutError, UpstreamError):
        return
    kept = [event[KV_PARAMS] for event in chunks_in(raw) if isinstance(event.get(KV_PARAMS), dict)]
    if kept and engine.capabilities.supports_release:
        await _release_turn(request, gateway, engine, kept[-1])


async def _read_late_answer(gateway: Gateway, answer: EngineAnswer) -> bytes:
    """Tell the engine by a half-closed connection that nothing more is wanted, and return what it
    still sends. Raises TimeoutError, UpstreamError."""
    answer.half_close()
    try:
        async with asyncio.timeout(LATE_ANSWER_TIMEOUT_S):
            return await answer.read(gateway.limits.max_answer_size)
    finally:
        answer.close()


async def release_prefill(request: Request, gateway: Gateway, name: str, params: KvParams) -> None:
    """Release the KV at the prefill engine `name`. Never raises an UpstreamError.

    The params outlive their request, so they need a reservation of memory for answers. Without room
    for it the lease has to expire.
    """
    reservation = Reservation(gateway.memory.answers)
    try:
        has_room = reservation.resize(len(params.raw))
        outcome = await _release_prefill(request, gateway, name, params) if has_room else "failed"
        gateway.metrics.releases.labels(outcome).inc()
    finally:
        reservation.release()


async def _release_prefill(request: Request, gateway: Gateway, name: str, params: KvParams) -> str:
    """Return the outcome as a metric label."""
    if params.has_generated_tokens:  # a decode engine must not continue from them
        params = params.without_generated_tokens()
    prefiller, is_proven = gateway.fleet.find_alive(name), params.has_prefix_hashes
    if prefiller is not None and is_proven:
        body: Body = {KV_PARAMS: params.fragment}
        if await _send(request, gateway, prefiller, RELEASE_PATH, body) == 200:
            return "done"

    # Try the request's own decode engine, which is connected to the prefill engine, and then one
    # more engine that can load from the prefill engine's group.
    known = gateway.fleet.find_alive(request.record.decoder)
    group = None if prefiller is None else prefiller.group
    decoders = [known] if known is not None and group in (None, known.group) else []
    usable = gateway.fleet.usable_engines(EngineRole.DECODE)
    decoders += [one for one in usable if one is not known and group in (None, one.group)][:1]
    model = request.body.get("model") if is_proven else RELEASE_MODEL
    body = {**one_token_body(model), KV_PARAMS: params.fragment}
    outcome = "no_decoder"
    for decoder in decoders:
        status = await _send(request, gateway, decoder, COMPLETIONS, body)
        if 200 <= status < 500:
            return "done"
        outcome = "failed"
    return outcome


def release_turn(request: Request, gateway: Gateway, entry: Entry) -> None:
    """Release the retained KV of a turn at its decode engine, if the engine supports that."""
    decoder = gateway.fleet.find_alive(entry.decoder)
    if decoder is not None and decoder.capabilities.supports_release:
        gateway.tasks.spawn(_release_turn(request, gateway, decoder, entry.params))


async def _release_turn(request: Request, gateway: Gateway, decoder: Engine, params: Body) -> None:
    status = await _send(request, gateway, decoder, RELEASE_PATH, {KV_PARAMS: params})
    gateway.metrics.releases.labels("done" if status == 200 else "failed").inc()


async def _send(request: Request, gateway: Gateway, engine: Engine, path: str, body: Body) -> int:
    """Send a side request and return the status of the answer, or 0 if there is none."""
    try:
        return (await send_side_request(request, engine, path, body, "release")).status
    except UpstreamError as error:
        gateway.throttle.warn("KV could not be released", f"{engine.name}: {error}")
        return 0
