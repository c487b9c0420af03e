"""The two legs that plans are made of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType

from router.fleet.engine import Engine, Role
from router.fleet.learned import Learned
from router.flows import headers, legs
from router.flows.errors import EngineError, EngineOverloadedError, NoEngineError, RejectedError
from router.flows.gateway import Gateway
from router.flows.prefilled import Params, Prefilled
from router.flows.request import Request, write_body
from router.upstream.answer import Answer
from router.upstream.deadlines import now
from router.upstream.errors import (
    BrokenAnswerError,
    ConnectError,
    LocalError,
    StaleConnectionError,
    UpstreamError,
)

Deliver = Callable[[Request, Gateway, Engine, Answer], Awaitable[None]]
Content = Callable[[Engine], tuple[bytes, bool]]
"""What an engine is sent, and whether it takes a fresh connection, which cannot be stale."""
LastTurn = Callable[[Engine], legs.Body | None]
MOST_TRIED = 3


class Leg:
    """An engine that was asked and its answer, which is given up at the end of a `with`."""

    __slots__ = ("_gateway", "answer", "engine")

    def __init__(self, gateway: Gateway, engine: Engine, answer: Answer) -> None:
        self.engine = engine
        self.answer = answer
        self._gateway = gateway

    def __enter__(self) -> Leg:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.answer.close()
        self.engine.in_flight -= 1
        if isinstance(error, UpstreamError | EngineError):
            self._gateway.note_failure(self.engine, error)


async def ask(
    request: Request,
    gateway: Gateway,
    role: Role,
    order: Sequence[Engine] | None,
    timeout: float,
    content: Content,
) -> Leg:
    """Asks the engine whose turn it is, or the first in this `order`; its answer is ready.

    Nothing was sent to an engine that cannot be reached, so the next may be asked safely. Three
    tries at most: a prefiller's blocks wait for the decoder no longer than their lease.

    Raises UpstreamError, or NoEngineError.
    """
    failure: Exception | None = None
    for engine in (gateway.in_turn(role) if order is None else order)[:MOST_TRIED]:
        body, fresh = content(engine)
        message = headers.message(
            request.record.endpoint, engine.name, request.leg_id, request.shared_headers, body
        )
        deadline = min(now() + timeout, request.latest)
        engine.in_flight += 1
        try:
            try:
                answer = await engine.pool.ask(message, deadline, fresh)
            except StaleConnectionError:
                answer = await engine.pool.ask(message, deadline, fresh=True)
            return Leg(gateway, engine, answer)
        except BaseException as error:
            engine.in_flight -= 1
            if isinstance(error, UpstreamError):
                gateway.note_failure(engine, error)
            if not isinstance(error, ConnectError | LocalError):
                raise
            if isinstance(error, ConnectError):
                gateway.fleet.unreachable(engine, str(error))
            failure = error
    raise failure or NoEngineError(f"no {role} engine is healthy")


async def prefill(
    request: Request,
    gateway: Gateway,
    order: Sequence[Engine] | None = None,
    last_turn: LastTurn | None = None,
) -> Prefilled:
    """Asks a prefiller; returns what it answered.

    `last_turn` says what each prefiller may pull from the last turn's decoder.

    Raises UpstreamError, EngineError, or RejectedError with the prefiller's own 4xx.
    """
    record, limits = request.record, gateway.limits
    record.stage = "prefill"
    started = now()

    def content(engine: Engine) -> tuple[bytes, bool]:
        record.prefiller = engine.name
        held = None if last_turn is None else last_turn(engine)
        # A decoder's blocks can be read once: what asks for them is not sent where it may be lost.
        return write_body(legs.prefill_body(request.body, held)), held is not None

    timeout = limits.prefill_timeout
    with await ask(request, gateway, Role.PREFILL, order, timeout, content) as leg:
        answer, engine = leg.answer, leg.engine
        body = await answer.read(limits.max_answer_size)
        _check(answer, engine, body)
        result = Prefilled(body)
    _note_proof(engine.learned, result.params)
    record.prefill_done = now()
    gateway.metrics.prefill_seconds.observe(record.prefill_done - started)
    return result


def _note_proof(learned: Learned, params: Params | None) -> None:
    """Reads the params of an engine only until it is known to prove what its blocks hold."""
    if params is not None:
        known = learned.proves_prefix and params.speaks_of_proof
        learned.proves_prefix = known or params.is_proven


async def relay(request: Request, gateway: Gateway, engine: Engine, answer: Answer) -> None:
    """Passes the decoder's answer to the client as it comes."""
    note_first_byte(request, answer)
    passed = headers.to_client(answer.headers, request.record.request_id)
    limits, exchange = gateway.limits, request.exchange
    if answer.is_whole and not answer.is_event_stream:
        await exchange.respond(answer.status, passed, await answer.read(limits.max_answer_size))
    else:
        request.event_stream = answer.is_event_stream
        idle = limits.stream_idle_timeout
        await exchange.relay(answer.status, passed, answer, idle, request.latest)
    note_done(request)


async def decode(
    request: Request,
    gateway: Gateway,
    content: bytes,
    order: Sequence[Engine] | None = None,
    deliver: Deliver = relay,
) -> None:
    """Asks a decoder with `content` and delivers its answer to the client.

    Raises UpstreamError, EngineError, or RejectedError with the decoder's own 4xx.
    """
    record, limits = request.record, gateway.limits
    record.stage = "decode"

    def given(engine: Engine) -> tuple[bytes, bool]:
        record.decoder, record.decode_started = engine.name, now()
        return content, False

    timeout = limits.decode_first_byte_timeout
    with await ask(request, gateway, Role.DECODE, order, timeout, given) as leg:
        answer, engine = leg.answer, leg.engine
        if answer.status != 200:
            _check(answer, engine, await answer.read(limits.max_answer_size))
        await deliver(request, gateway, engine, answer)


def note_first_byte(request: Request, answer: Answer) -> None:
    record = request.record
    record.stage, record.status, record.first_byte = "stream", answer.status, answer.first_body_at


def note_done(request: Request) -> None:
    request.record.stage, request.record.outcome = "done", "ok"


def _check(answer: Answer, engine: Engine, body: bytes) -> None:
    """200 is an answer; 4xx is for the client as it is; anything else is the engine's failure."""
    if answer.status == 200:
        return
    if 400 <= answer.status < 500:
        raise RejectedError(answer.status, answer.headers, body)
    if answer.status < 400:
        raise BrokenAnswerError(f"an answer with status {answer.status}")
    kind = EngineOverloadedError if answer.status == 503 else EngineError
    raise kind(f"the {engine.role} engine answered {answer.status}{legs.message_in(body)}")
