"""Frees a prefiller's blocks that no decoder will read, long before their lease ends.

A decoder that has the request frees them itself when the request is aborted. But the client may
leave, or the decoder fail, before the decoder has it. Then our prefillers are told at a page of
their own: one hop, and no decoder is needed, which may be what has failed. Where that does not
work, a decoder gets a small request. With one of our prefillers, whose params prove what they hold,
it finds that this shares nothing with the prefilled prompt and tells the prefiller at once. Without
proof it would read; so it is asked for a model that nobody serves, and when it rejects a request
with kv_transfer_params it tells the prefiller too (vllm#41269). Told twice is told once.

A decoder that keeps a turn which nobody will pull is told so at the same page.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from router.conversations.entry import Entry
from router.fleet.engine import Engine
from router.fleet.engine_spec import EngineRole
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

# Seconds that a prefiller whose request was given up may take to say that it had ended by then.
LATE_ANSWER_TIMEOUT_S = 1.0
# Seconds after which a decoder has read, tokenized and queued a request, even under load.
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
    """A decoder's first byte shows it; its second token, where it was handed the first, which it
    says before it has any KV. Where nobody counts, the prefiller knows."""
    if run.request.record.first_byte is None:
        return False
    buffer = run.resume.buffer
    return not params.continues_tokens or (buffer is not None and buffer.num_tokens > 1)


def _has_leg_arrived(request: Request) -> bool:
    """Whether the decoder surely has the leg, so that its abort releases the prefiller."""
    started = request.record.decode_started
    return started is not None and now() - started > LEG_ARRIVAL_TIME_S


async def release_late_prefill(request: Request, gateway: Gateway, answer: EngineAnswer) -> None:
    """The client left while a prefiller worked. It is told so by a half-closed connection; what it
    had answered by then still comes, and names blocks that nobody will read. Never raises."""
    answer.half_close()
    try:
        async with asyncio.timeout(LATE_ANSWER_TIMEOUT_S):
            raw = await answer.read(gateway.limits.max_answer_size)
            params = PrefillAnswer(raw).params if answer.status == 200 else None
    except (TimeoutError, UpstreamError):
        return
    finally:
        answer.close()
    if params is not None:
        await release_prefill(request, gateway, request.record.prefiller, params)


async def release_late_turn(
    request: Request, gateway: Gateway, engine: Engine, answer: EngineAnswer
) -> None:
    """A decoder was left for another while it answered. It is told so by a half-closed connection;
    what it had answered by then still comes, and at its end is what it keeps. Never raises."""
    answer.half_close()
    try:
        async with asyncio.timeout(LATE_ANSWER_TIMEOUT_S):
            raw = await answer.read(gateway.limits.max_answer_size)
    except (TimeoutError, UpstreamError):
        return
    finally:
        answer.close()
    kept = [event[KV_PARAMS] for event in chunks_in(raw) if isinstance(event.get(KV_PARAMS), dict)]
    if kept and engine.capabilities.supports_release:
        await _release_turn(request, gateway, engine, kept[-1])


async def release_prefill(request: Request, gateway: Gateway, name: str, params: KvParams) -> None:
    """Tells the prefiller of that `name`, itself or through a decoder, that nobody will read. Never
    raises. The params are held beyond their request, so they have to find room."""
    reservation = Reservation(gateway.memory.answers)
    try:
        has_room = reservation.resize(len(params.raw))
        outcome = await _release_prefill(request, gateway, name, params) if has_room else "failed"
        gateway.metrics.releases.labels(outcome).inc()
    finally:
        reservation.release()


async def _release_prefill(request: Request, gateway: Gateway, name: str, params: KvParams) -> str:
    """Returns the outcome, as the metric has it."""
    if params.has_generated_tokens:  # of which nobody here is to begin anything
        params = params.without_generated_tokens()
    prefiller = gateway.fleet.find_alive(name)
    if prefiller is not None and params.has_prefix_proof:
        status = await _send(
            request, gateway, prefiller, RELEASE_PATH, {KV_PARAMS: params.fragment}
        )
        if status == 200:
            return "done"
    outcome = "no_decoder"
    group = None if prefiller is None else prefiller.group
    for decoder in _decoders_to_release_with(request, gateway, group):
        status = await _send(
            request, gateway, decoder, COMPLETIONS, _abort_body(request.body, params)
        )
        outcome = "done" if 200 <= status < 500 else "failed"
        if outcome == "done":
            break
    return outcome


def release_turn(request: Request, gateway: Gateway, entry: Entry) -> None:
    """Nobody will pull this turn's KV: its decoder frees it before its time."""
    decoder = gateway.fleet.find_alive(entry.decoder)
    if decoder is not None and decoder.capabilities.supports_release:
        gateway.tasks.spawn(_release_turn(request, gateway, decoder, entry.params))


async def _release_turn(request: Request, gateway: Gateway, decoder: Engine, params: Body) -> None:
    status = await _send(request, gateway, decoder, RELEASE_PATH, {KV_PARAMS: params})
    gateway.metrics.releases.labels("done" if status == 200 else "failed").inc()


async def _send(request: Request, gateway: Gateway, engine: Engine, path: str, body: Body) -> int:
    """The answer's status, 0 without one."""
    try:
        return (await send_side_request(request, engine, path, body, "release")).status
    except UpstreamError as error:
        gateway.throttle.warn("KV could not be released", f"{engine.name}: {error}")
        return 0


def _decoders_to_release_with(
    request: Request, gateway: Gateway, group: str | None
) -> Sequence[Engine]:
    """The one that was asked, which knows the prefiller already, unless that is what failed; and
    another one. Nobody of a group that cannot read from the prefiller's `group`, if that is known.
    """
    known = gateway.fleet.find_alive(request.record.decoder)
    able = [
        one for one in gateway.fleet.usable_engines(EngineRole.DECODE) if group in (None, one.group)
    ]
    first = [known] if known is not None and group in (None, known.group) else []
    return first + [one for one in able if one is not known][:1]


def _abort_body(body: Body, params: KvParams) -> Body:
    model = body.get("model") if params.has_prefix_proof else RELEASE_MODEL
    return {**one_token_body(model), KV_PARAMS: params.fragment}
