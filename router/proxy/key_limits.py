"""A request's API key: authentication, a permit from the key's limits, and its release."""

from __future__ import annotations

from collections.abc import Sequence

from router.auth.api_keys import ApiKey
from router.auth.authenticator import MISSING, Authenticator, QuotaPermit
from router.auth.quota_ledger import CONCURRENCY, QuotaDecision, format_duration
from router.auth.streamed_usage import StreamedUsage
from router.openai.errors import ForbiddenModelError, RateLimitError, UnauthorizedError
from router.proxy.exchange import BodySource, Exchange, ExchangeWrapper, FilteredStream, Header
from router.proxy.relay import EVENT_STREAM
from router.proxy.request import PASSED, PROMPT_LIST, Request
from router.telemetry.metrics import Metrics
from router.telemetry.request_metrics import tokens_of

LIMIT_PREFIX = b"x-ratelimit-"
# Fields for the length of an answer, and the largest length that counts as valid.
LENGTH_FIELDS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
MAX_REQUESTED_TOKENS = 10**9
# Requests with these outcomes use no tokens of the limits.
UNCHARGED_OUTCOMES = frozenset(("refused", "failed", "engine_error"))


def identify_key(exchange: Exchange, authenticator: Authenticator) -> ApiKey:
    """Return the request's API key, and replace the credential in its headers by the key's owner.

    The server refuses requests without a valid key; one that reaches the proxy in spite of that
    raises UnauthorizedError.
    """
    key = exchange.caller
    if key is None:
        raise UnauthorizedError(MISSING)
    exchange.headers = authenticator.with_owner(exchange.headers, key)
    return key


async def admit_request(
    request: Request, key: ApiKey, authenticator: Authenticator, metrics: Metrics
) -> QuotaPermit | None:
    """Check a request that was read against its key's models and limits.

    Return what the request takes of the limits, if the key has some. Raises ForbiddenModelError,
    RateLimitError.
    """
    request.record.key = key.name
    if not key.allows_model(request.model):
        raise ForbiddenModelError(request.requested_model, key.models)
    if not key.has_limits:
        return None
    permit = await acquire_permit(
        key, request.tokens + requested_tokens(request), authenticator, metrics
    )
    if key.tokens_per_minute is not None and request.decode_only_reason != PASSED:
        asked = StreamedUsage.ask(request.body)
        if asked is not None:
            permit.usage, request.body = asked
    lines = limit_headers(permit.decision)
    request.exchange = RateLimitedExchange(request.exchange, permit.usage, lines)
    return permit


async def acquire_permit(
    key: ApiKey, tokens: int, authenticator: Authenticator, metrics: Metrics
) -> QuotaPermit:
    """Return a permit, which must be released. Raises RateLimitError."""
    result = await authenticator.acquire(key, tokens)
    if isinstance(result, QuotaDecision):
        metrics.rate_limited.labels(key.name, result.refused).inc()
        raise RateLimitError(
            _limit_message(key, result), result.refused, result.wait, limit_headers(result)
        )
    return result


def release_permit(request: Request, permit: QuotaPermit, authenticator: Authenticator) -> None:
    """Release the permit of an ended request, and count what the request used."""
    authenticator.release(permit, count_used_tokens(request, permit.usage))


def count_used_tokens(request: Request, streamed: StreamedUsage | None) -> int:
    """Return the tokens that a request has used. `streamed` has counted those of its stream.

    Engines report them. Without a report, the prompt counts with its estimate, and an answer that
    was not streamed with the requested tokens.
    """
    record = request.record
    is_untouched = record.prefill_started is None and record.decode_started is None
    if is_untouched or record.outcome in UNCHARGED_OUTCOMES:
        return 0
    reported = tokens_of(record)
    prompt, completion = reported.prompt, reported.completion
    if record.streamed and streamed is not None:
        completion = streamed.completion_tokens
        if request.decode_only_reason == PROMPT_LIST and not streamed.is_complete:
            prompt = None  # an event's usage counts one prompt
    elif completion is None:
        completion = requested_tokens(request)
    return (request.tokens if prompt is None else prompt) + completion


def requested_tokens(request: Request) -> int:
    """Return the most tokens that the answer may have, or 0 if the request sets no limit."""
    body = request.body
    length = next(filter(None, map(_count, map(body.get, LENGTH_FIELDS))), 0)
    return min(length * (_count(body.get("n")) or 1), MAX_REQUESTED_TOKENS)


def _count(value: object) -> int:
    if isinstance(value, int | float) and 0 < value <= MAX_REQUESTED_TOKENS:
        return int(value)
    return 0


def limit_headers(decision: QuotaDecision) -> list[Header]:
    """Return the x-ratelimit headers that OpenAI documents."""
    headers: list[Header] = []
    for name, status in ((b"requests", decision.requests), (b"tokens", decision.tokens)):
        if status is not None:
            headers.append((b"x-ratelimit-limit-" + name, b"%d" % status.limit))
            headers.append((b"x-ratelimit-remaining-" + name, b"%d" % status.remaining))
            reset = format_duration(status.reset).encode()
            headers.append((b"x-ratelimit-reset-" + name, reset))
    return headers


def _limit_message(key: ApiKey, decision: QuotaDecision) -> str:
    wait = f"Please try again in {format_duration(decision.wait)}."
    if decision.refused == CONCURRENCY:
        return f"Rate limit reached: {key.concurrency} requests at once are running. {wait}"
    status = decision.requests if decision.refused == "requests" else decision.tokens
    assert status is not None
    return (
        f"Rate limit reached on {decision.refused} per minute: Limit {status.limit}, "
        f"Remaining {status.remaining}. {wait}"
    )


class RateLimitedExchange(ExchangeWrapper):
    """An Exchange that adds the key's limits to the answer's headers. `usage` counts a stream."""

    def __init__(
        self, inner: Exchange, usage: StreamedUsage | None, limit_headers: Sequence[Header]
    ) -> None:
        super().__init__(inner)
        self._usage = usage
        self._lines = limit_headers

    async def respond(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        if self._usage is not None and EVENT_STREAM[0] in headers:  # of an answer that was whole
            body = self._usage.passing(body)
        await super().respond(status, headers, body)

    async def relay(
        self, status: int, headers: Sequence[Header], answer: BodySource, idle: float, latest: float
    ) -> None:
        if self._usage is not None and answer.is_event_stream:
            answer = FilteredStream(answer, self._usage.passing)
        await super().relay(status, headers, answer, idle, latest)

    async def finish(self, tail: bytes) -> None:
        await super().finish(tail if self._usage is None else self._usage.passing(tail))

    def _client_headers(self, headers: Sequence[Header]) -> list[Header]:
        """Replace the limits that an engine reports, which are those of the router there."""
        return [*(h for h in headers if not h[0].startswith(LIMIT_PREFIX)), *self._lines]
