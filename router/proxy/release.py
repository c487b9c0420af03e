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

A release is saved where it would add to an overload: at an engine that has asked for a pause
(Retry-After), and beyond the budget for retries. The lease then expires.

A second release of the same blocks has no effect. Retained KV of a turn that no prefill engine will
read is released by the same endpoint of the decode engine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from time import monotonic as now
from typing import Any

from router.conversations.entry import Entry
from router.fleet.engine import Engine, EngineRole
from router.fleet.fleet import Fleet
from router.http_client.answer_limits import MemoryBudget, Reservation
from router.http_client.engine_answer import EngineAnswer
from router.http_client.errors import UpstreamError
from router.openai.answers import chunks_in
from router.proxy.answer_check import PrefillAnswer
from router.proxy.kv_params import KvParams, with_field
from router.proxy.request import COMPLETIONS, KV_PARAMS, Body, Request
from router.proxy.side_requests import Cause, one_token_body, send_side_request
from router.telemetry.logs import LogThrottle
from router.telemetry.metrics import Metrics

# Seconds that a cancelled leg may take to return an answer that its engine had finished by then.
LATE_ANSWER_TIMEOUT_S = 1.0
# Seconds for which a prefill leg goes on after its client has left if the engine would keep the KV
# of a prompt that it finishes in the moment of its abort, with no answer that tells of it.
UNABORTED_PREFILL_S = 3.0
# Seconds after which a decode engine has read, tokenized and queued a leg, even under load.
LEG_ARRIVAL_TIME_S = 5.0
# Seconds for which the leg of a client that has left goes on; see `KvReleaser.await_reading`.
READING_TIMEOUT_S = 1.0
RELEASE_PATH = "/disagg/release"
RELEASE_MODEL = "disagg-router/released"
Spawn = Callable[[Coroutine[Any, Any, None]], object]


class KvReleaser:
    """Releases KV in tasks that outlive their request. Nothing here raises an UpstreamError.

    The params of a release outlive their request as well, so they need a reservation of `memory`,
    the budget for answers. Without room for it the lease has to expire.
    """

    def __init__(
        self,
        fleet: Fleet,
        metrics: Metrics,
        memory: MemoryBudget,
        throttle: LogThrottle,
        spawn: Spawn,
        max_answer_bytes: int,
        take_budget: Callable[[float], bool],
    ) -> None:
        """`take_budget` is `RetryBudget.take`."""
        self._fleet = fleet
        self._metrics = metrics
        self._memory = memory
        self._throttle = throttle
        self._spawn = spawn
        self._max_answer_bytes = max_answer_bytes
        self._take_budget = take_budget

    def release_prefill(
        self, request: Request, params: KvParams, cause: BaseException | None = None
    ) -> None:
        """Release KV of the request's prefill engine that no decode engine has read.

        `cause` is what ended the decode leg, if something has: if the client disconnected after the
        decode engine got the leg, its abort releases the blocks.
        """
        if not (isinstance(cause, asyncio.CancelledError) and _has_leg_arrived(request)):
            self._spawn(self._release_prefill(request, request.record.prefiller, params))

    def release_by_reading(
        self, request: Request, group: str, body: Body, gone: Engine | None = None
    ) -> None:
        """Send `LegPair.release` to a decode engine of the group: it reads the KV, so the prefill
        engine frees it. `gone`: the lost decode engine, which is not asked."""
        usable = self._fleet.usable_engines(EngineRole.DECODE)
        others = [one for one in usable if one is not gone and one.group == group]
        if others:
            self._spawn(self._release_by_reading(request, others[0], body))

    def await_reading(self, answer: EngineAnswer) -> None:
        """Close a decode leg whose client has disconnected once the engine answers or the timeout
        ends. By then the engine has read the KV, or it has queued the request and reports the abort
        to the prefill engine."""
        self._spawn(self._await_reading(answer))

    def release_late_prefill(
        self, request: Request, group: str, answer: EngineAnswer, release: Body | None
    ) -> None:
        """End a prefill leg whose client has disconnected, and release its blocks if the engine had
        finished by then. `release`: see `LegPair.release`; such a leg is ended only if it lasts for
        much longer. None if the answer has params."""
        self._spawn(self._release_late_prefill(request, group, answer, release))

    def release_late_turn(self, request: Request, engine: Engine, answer: EngineAnswer) -> None:
        """End a hedged decode leg of a turn that another leg has won, and release its retained KV
        if the engine had finished by then."""
        self._spawn(self._release_late_turn(request, engine, answer))

    def release_turn(self, request: Cause, entry: Entry) -> None:
        """Release the retained KV of a turn at its decode engine, if the engine supports that."""
        decoder = self._fleet.find_alive(entry.decoder)
        if decoder is not None and decoder.capabilities.supports_release:
            self._spawn(self._release_turn(request, decoder, entry.params))

    async def _await_reading(self, answer: EngineAnswer) -> None:
        with contextlib.suppress(TimeoutError, UpstreamError):
            async with asyncio.timeout(READING_TIMEOUT_S):
                await answer.ready()
        answer.close()

    async def _release_by_reading(self, request: Request, decoder: Engine, body: Body) -> None:
        if (model := request.body.get("model")) is not None:
            body = {"model": model, **body}
        status = await self._send(request, decoder, COMPLETIONS, body)
        self._metrics.releases.labels("done" if status == 200 else "failed").inc()

    async def _release_late_prefill(
        self, request: Request, group: str, answer: EngineAnswer, release: Body | None
    ) -> None:
        try:
            patience = 0.0 if release is None else UNABORTED_PREFILL_S
            raw = await self._read_late_answer(answer, patience)
            if answer.status != 200:
                return
            params = PrefillAnswer(raw).params
        except (TimeoutError, UpstreamError):
            return
        if release is not None:
            self.release_by_reading(request, group, release)
        elif params is not None:
            await self._release_prefill(request, request.record.prefiller, params)

    async def _release_late_turn(
        self, request: Request, engine: Engine, answer: EngineAnswer
    ) -> None:
        try:
            events = [*chunks_in(await self._read_late_answer(answer))]
        except (TimeoutError, UpstreamError):
            return
        kept = [event[KV_PARAMS] for event in events if isinstance(event.get(KV_PARAMS), dict)]
        if kept and engine.capabilities.supports_release:
            await self._release_turn(request, engine, kept[-1])

    async def _read_late_answer(self, answer: EngineAnswer, patience: float = 0.0) -> bytes:
        """Wait `patience` seconds for the answer. Then tell the engine by a half-closed connection
        that nothing more is wanted, and return what it still sends. Raises TimeoutError,
        UpstreamError."""
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await answer.ready()
            answer.half_close()
            async with asyncio.timeout(LATE_ANSWER_TIMEOUT_S):
                return await answer.read(self._max_answer_bytes)
        finally:
            answer.close()

    async def _release_prefill(self, request: Request, name: str, params: KvParams) -> None:
        reservation = Reservation(self._memory)
        try:
            has_room = reservation.resize(len(params.raw))
            outcome = await self._send_releases(request, name, params) if has_room else "failed"
            self._metrics.releases.labels(outcome).inc()
        finally:
            reservation.release()

    async def _send_releases(self, request: Request, name: str, params: KvParams) -> str:
        """Ask engines to release the KV at the prefill engine `name`. Return a metric label."""
        if params.has_generated_tokens:  # a decode engine must not continue from them
            params = params.without_generated_tokens()
        prefiller = self._fleet.find_alive(name)
        is_proven = params.has_prefix_hashes
        if prefiller is not None and is_proven:
            body: Body = {KV_PARAMS: params.fragment}
            if await self._send(request, prefiller, RELEASE_PATH, body) == 200:
                return "done"

        # Try the request's own decode engine, which is connected to the prefill engine, and then
        # one more engine that can load from the prefill engine's group.
        known = self._fleet.find_alive(request.record.decoder)
        group = None if prefiller is None else prefiller.group
        decoders = [known] if known is not None and group in (None, known.group) else []
        usable = self._fleet.usable_engines(EngineRole.DECODE)
        decoders += [one for one in usable if one is not known and group in (None, one.group)][:1]
        model = request.body.get("model") if is_proven else RELEASE_MODEL
        # Else engine_ext would retain the KV of this answer for a next turn.
        unretained = with_field(params, b'"retain":false').fragment
        body = {**one_token_body(model), KV_PARAMS: unretained}
        outcome = "no_decoder"
        for decoder in decoders:
            status = await self._send(request, decoder, COMPLETIONS, body)
            if 200 <= status < 500:
                return "done"
            outcome = "failed"
        return outcome

    async def _release_turn(self, request: Cause, decoder: Engine, params: Body) -> None:
        status = await self._send(request, decoder, RELEASE_PATH, {KV_PARAMS: params})
        self._metrics.releases.labels("done" if status == 200 else "failed").inc()

    async def _send(self, request: Cause, engine: Engine, path: str, body: Body) -> int:
        """Send a side request and return the status of the answer, or 0 if there is none."""
        if engine.is_cooling or not self._take_budget(now()):
            return 0
        try:
            return (await send_side_request(request, engine, path, body, "release")).status
        except UpstreamError as error:
            self._throttle.warn("KV could not be released", f"{engine.name}: {error}")
            return 0


def _has_leg_arrived(request: Request) -> bool:
    """Return True if the decode engine has the leg, so that its abort releases the blocks."""
    started = request.record.decode_started
    return started is not None and now() - started > LEG_ARRIVAL_TIME_S
