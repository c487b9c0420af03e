"""Connects pairs of engines before a user's request does (warm-up).

The first KV transfer between two engines needs a handshake, which takes seconds on real hardware.
So the router sends a small request of its own along both legs of each new pair: a prompt of random
tokens, which no cache holds, and one token of answer. It asks for what the canary compares: stock
vLLM compiles a kernel at its first request with log-probabilities. A pair is tried once. If its
warm-up fails, the first request of the pair waits for the handshake, as it would without warm-ups.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from random import Random
from secrets import token_hex
from time import monotonic as now
from typing import NamedTuple, TypeVar

from router.auth.api_keys import ApiKey
from router.fleet.engine import DECODE, PREFILL, Engine, EngineRole, Health
from router.http_client.errors import BrokenAnswerError, UpstreamError
from router.openai.errors import EngineError, EngineRejectedError, RequestError
from router.proxy.canary import Canary, make_test_canary
from router.proxy.exchange import BodySource, Header
from router.proxy.gateway import Gateway
from router.proxy.kv_protocols import protocol_of
from router.proxy.kv_protocols.nixl_push import make_push
from router.proxy.legs import LegFailure, LegRefusal, decode_leg, prefill_leg
from router.proxy.messages import LegBodies
from router.proxy.plan import PULL, PUSH, TRANSFER, Plan, choose_mode
from router.proxy.request import Request, next_number
from router.proxy.resume import DecodeParams, ResumeState
from router.proxy.run import AnswersHeld, Run
from router.proxy.strategies import legs_together, send_pair
from router.routing.route import Route
from router.telemetry.record import Record

logger = logging.getLogger("disagg_router.fleet")

T = TypeVar("T")
LAZY, EAGER = "lazy", "eager"
# Seconds between two looks for new engines.
SCAN_INTERVAL_S = 0.2
# Seconds that one warm-up request may take.
WARM_UP_TIMEOUT_S = 20.0
# Seconds for which EAGER keeps client requests from a new engine at most.
MAX_COLD_S = 30.0
MAX_CONCURRENT_WARM_UPS = 2
# Engines of the other role with which a new engine is connected.
MAX_PARTNERS = 64
# Pairs that wait for their warm-up. Client requests connect further pairs in the meantime.
MAX_WAITING_PAIRS = 4096
# The prompt: longer than two blocks of any usual size, of small ids that every vocabulary has.
WARM_UP_TOKENS = 260
PROMPT_TOKEN_IDS = range(5, 200)
ENDPOINT = "/v1/completions"


class EngineLife(NamedTuple):
    """An engine from the moment that it is found healthy until it is lost, or changes its role or
    group."""

    engine: Engine
    lost_at: float
    role: EngineRole
    group: str

    @property
    def is_current(self) -> bool:
        engine = self.engine
        is_up = engine.health is Health.HEALTHY and engine.is_usable
        return is_up and self == _life_of(engine)


def _life_of(engine: Engine) -> EngineLife:
    return EngineLife(engine, engine.lost_at, engine.role, engine.group)


class EnginePair(NamedTuple):
    prefiller: EngineLife
    decoder: EngineLife

    @property
    def is_current(self) -> bool:
        return self.prefiller.is_current and self.decoder.is_current

    @property
    def can_pair(self) -> bool:
        """KV may move between the engines as they are now. An engine may have changed its model."""
        prefiller, decoder = self.prefiller.engine, self.decoder.engine
        plays = prefiller.role.plays(PREFILL) and decoder.role.plays(DECODE)
        return plays and can_pair(prefiller, decoder)


class PairAnswer(NamedTuple):
    """A request that was answered. `offers_kv`: the prefill engine has offered its KV."""

    request_id: str
    offers_kv: bool


class EngineWarmer:
    """Warms pairs of engines in the background.

    Mode LAZY warms the pairs of engines that join while the router runs. Mode EAGER warms all pairs
    and keeps client requests from an engine that joins until its pairs are warm, as long as other
    engines are available, and for `max_cold_s` seconds at most.
    """

    def __init__(self, gateway: Gateway, mode: str, max_cold_s: float = MAX_COLD_S) -> None:
        self._gateway = gateway
        self._mode = mode
        self._max_cold_s = max_cold_s
        self._random = Random()
        # Engines whose pairs are warm, are being warmed or wait for it.
        self._met: set[EngineLife] = set()
        self._waiting: deque[EnginePair] = deque()
        self._running: dict[asyncio.Task[None], EnginePair] = {}
        # Engines that get no client requests yet, and until which loop time.
        self._cold: dict[EngineLife, float] = {}
        self._first = frozenset(gateway.fleet.engines)

    async def run(self) -> None:
        """Warm new pairs until the task is cancelled."""
        looked_at = None
        try:
            while True:
                snapshot = self._gateway.fleet.snapshot
                try:
                    if snapshot is not looked_at:
                        looked_at = snapshot
                        await self._find_new_engines()
                    self._start_warm_ups()
                    self._admit_warm_engines()
                except Exception:
                    logger.exception("the warm-up of new engines failed")
                await asyncio.sleep(SCAN_INTERVAL_S)
        finally:
            for task in self._running:
                task.cancel()

    async def _find_new_engines(self) -> None:
        """Find the engines that are new since the last call, and queue their pairs.

        The loop runs other tasks after each engine, so that a thousand new engines do not delay
        requests.
        """
        engines = self._gateway.fleet.engines
        alive = {life for engine in engines if (life := _life_of(engine)).is_current}
        new, self._met = alive - self._met, self._met & alive
        latest = now() + self._max_cold_s
        self._cold |= {life: latest for life in new if life.engine.is_cold}
        self._waiting = deque(pair for pair in self._waiting if pair.is_current)
        for life in sorted(new, key=lambda life: life.engine.name):
            if len(self._waiting) < MAX_WAITING_PAIRS:
                partners = self._met if self._mode == EAGER else self._new_partners(life)
                self._waiting += _pairs(life, partners)
            self._met.add(life)
            await asyncio.sleep(0)

    def _new_partners(self, life: EngineLife) -> Iterable[EngineLife]:
        """Return the engines to which this one may not be connected yet. Two engines that were
        there when the router started, and were not lost since, count as connected."""
        if not self._was_present_at_start(life):
            return self._met
        return [other for other in self._met if not self._was_present_at_start(other)]

    def _was_present_at_start(self, life: EngineLife) -> bool:
        return life.engine in self._first and not life.lost_at

    def _start_warm_ups(self) -> None:
        while self._waiting and len(self._running) < MAX_CONCURRENT_WARM_UPS:
            pair = self._waiting.popleft()
            if pair.is_current and pair.can_pair:
                task = asyncio.get_running_loop().create_task(self._warm(pair))
                self._running[task] = pair
                task.add_done_callback(self._running.pop)

    def _admit_warm_engines(self) -> None:
        """Let client requests go to the engines that are warm, or have waited long enough."""
        if not self._cold:
            return
        unfinished = {life for pair in (*self._waiting, *self._running.values()) for life in pair}
        for life, latest in list(self._cold.items()):
            if life not in unfinished or now() >= latest or not life.is_current:
                del self._cold[life]
                if life.is_current:
                    self._gateway.fleet.note_warm(life.engine)

    async def _warm(self, pair: EnginePair) -> None:
        """Warm a pair and count the outcome. Raises only CancelledError."""
        prefiller, decoder = pair.prefiller.engine, pair.decoder.engine
        started = now()
        try:
            async with asyncio.timeout(WARM_UP_TIMEOUT_S):
                await self._connect(prefiller, decoder)
        except (UpstreamError, EngineError, RequestError, TimeoutError) as error:
            outcome = "failed"
            self._gateway.throttle.warn(
                "a pair of engines could not be warmed",
                f"{prefiller.name}, {decoder.name}: {error}",
            )
        except Exception:
            outcome = "failed"
            logger.exception("%s and %s could not be warmed", prefiller.name, decoder.name)
        else:
            outcome = "done"
            took = now() - started
            logger.info("warm-up of %s and %s took %.2f s", prefiller.name, decoder.name, took)
        self._gateway.metrics.warm_ups.labels(outcome).inc()

    async def _connect(self, prefiller: Engine, decoder: Engine) -> None:
        """Raises UpstreamError, EngineError or RequestError."""
        prompt = self._random.choices(PROMPT_TOKEN_IDS, k=WARM_UP_TOKENS)
        canary = make_test_canary(True) if self._gateway.limits.kv_canary else None
        try:
            await send_test_request(self._gateway, prefiller, decoder, prompt, canary)
        except EngineRejectedError:  # perhaps it allows no log-probabilities
            if canary is None:
                raise
            await send_test_request(self._gateway, prefiller, decoder, prompt)


async def send_test_request(
    gateway: Gateway,
    prefiller: Engine,
    decoder: Engine,
    prompt: Sequence[int],
    canary: Canary | None = None,
) -> PairAnswer:
    """Send a request of the router's own, a prompt of token ids, through two engines. The canary
    compares their first tokens.

    Raises UpstreamError, EngineError or RequestError. The caller limits the time.
    """
    limits = gateway.limits
    route = Route(prefiller.group, (prefiller,), (decoder,))
    request = _test_request(gateway, prefiller, decoder, prompt)
    protocol = protocol_of(prefiller)
    pushes = protocol is None and choose_mode(route, limits.transfer_mode) is PUSH
    push = make_push(request, prefiller, decoder, forced=True) if pushes else None
    mode = TRANSFER if protocol is not None else PULL if push is None else PUSH
    plan = Plan("warm_up", mode, route)
    run = Run(
        request,
        LegBodies(request.body),
        plan,
        gateway,
        route,
        ResumeState(request, gateway, limits.max_resumes),
        AnswersHeld(gateway.memory.answers),
    )
    run.canary = canary
    offers_kv = True
    try:
        if protocol is not None:
            pair = protocol.pair(request, prefiller, decoder)
            if pair is None:
                raise EngineError(f"the pages of {prefiller.name} do not show how it sends KV")
            failed = await send_pair(run, prefiller, decoder, protocol, pair)
            if failed is not None:
                raise failed.error
        elif push is None:
            prefilled = _require(await prefill_leg(run, prefiller))
            params = prefilled.params
            offers_kv = params is not None
            if offers_kv:
                run.prefiller = prefiller
                run.hold(prefiller)
            try:
                if prefiller.group != decoder.group:
                    raise BrokenAnswerError("the engines are in different groups by now")
                _require(await decode_leg(run, decoder, DecodeParams(params)))
            except BaseException as cause:
                run.release_unread(params, cause)
                raise
        else:
            failed = await legs_together(run, prefiller, decoder, push)
            if failed is not None:
                raise failed.error
    finally:
        run.stop_holding(is_read=True)
        run.close()
    return PairAnswer(request.record.request_id, offers_kv)


def _test_request(
    gateway: Gateway, prefiller: Engine, decoder: Engine, prompt: Sequence[int]
) -> Request:
    models = _shared_models(prefiller, decoder)
    body = {
        **({"model": min(models)} if models else {}),
        "prompt": prompt,
        "max_tokens": 1,
        "temperature": 0,
        "stream": False,
    }
    moment = now()
    exchange = DiscardedExchange(asyncio.get_running_loop(), moment)
    record = Record(ENDPOINT, moment, f"warm-up-{token_hex(8)}")
    latest = moment + WARM_UP_TIMEOUT_S
    made = Request(exchange, record, gateway.engine_line, latest, next_number())
    made.body, made.model, made.tokens = body, body.get("model"), len(prompt)
    return made


class DiscardedExchange:
    """An Exchange without a client: the answer is discarded."""

    endpoint = ENDPOINT
    headers: Sequence[Header] = ()
    body = b""
    caller: ApiKey | None = None

    def __init__(self, loop: asyncio.AbstractEventLoop, arrived: float) -> None:
        self.loop = loop
        self.arrived = arrived
        self.started = False

    async def respond(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        self.started = True

    async def relay(
        self, status: int, headers: Sequence[Header], answer: BodySource, idle: float, latest: float
    ) -> None:
        """Discard the answer. The request asks for no stream."""
        self.started = True

    async def finish(self, tail: bytes) -> None:
        return

    def abort(self) -> None:
        return


def _require(outcome: T | LegFailure | LegRefusal) -> T:
    """Return the outcome of a leg that has succeeded. Raises the error of one that has not."""
    if isinstance(outcome, LegFailure | LegRefusal):
        raise outcome.error
    return outcome


def _pairs(life: EngineLife, partners: Iterable[EngineLife]) -> Iterable[EnginePair]:
    """Return the pairs of an engine with those partners to which KV may move. Busy partners come
    first, because client requests would use these pairs first."""
    near = [other for other in partners if can_pair(life.engine, other.engine)]
    near.sort(key=lambda other: (-other.engine.in_flight, other.engine.name))
    pairs: list[EnginePair] = []
    for other in near[:MAX_PARTNERS]:
        if life.engine.role.plays(PREFILL) and other.engine.role.plays(DECODE):
            pairs.append(EnginePair(life, other))
        if life.engine.role.plays(DECODE) and other.engine.role.plays(PREFILL):
            pairs.append(EnginePair(other, life))
    return pairs


def can_pair(one: Engine, other: Engine) -> bool:
    """Return True if the engines are in one group and may serve the same model."""
    return one.group == other.group and _shared_models(one, other) != frozenset()


def _shared_models(one: Engine, other: Engine) -> frozenset[str] | None:
    """Return the models that both engines serve, or None if those of neither are known."""
    if one.models is None or other.models is None:
        return one.models or other.models
    return one.models & other.models
