"""Converts an engine's answer with another status than 200 to the error of its leg, and records
what the answer shows about the engine."""

from __future__ import annotations

import logging
from time import monotonic as now

from router.common.deadlines import Deadlines, TimeLimit
from router.fleet.engine import Engine
from router.http_client.engine_answer import EngineAnswer
from router.http_client.errors import BrokenAnswerError, UpstreamError
from router.openai.answers import error_in, parse_object
from router.openai.errors import (
    JSON,
    EngineError,
    EngineOverloadedError,
    EngineRejectedError,
    EngineUnavailableError,
    LoadFailedError,
    UnservedModelError,
    error_body,
    type_of_status,
)
from router.openai.request_fields import restate_prompt_limit
from router.proxy import messages
from router.proxy.load_failure import LoadFailure, failure_in_error
from router.proxy.loans import LegLoan
from router.proxy.messages import error_text
from router.proxy.request import PASSED, Body
from router.proxy.run import Run

logger = logging.getLogger("disagg_router.proxy")
# For the error body of an engine that has failed.
ERROR_BODY_TIMEOUT_S = 1.0
MAX_ERROR_BODY_BYTES = 256 * 1024
NOT_LOADED = "the decode engine could not load the KV of this prompt"
NOT_BORROWED = "the engine could not load the KV that it was to borrow"
# What servers say of an unknown path, besides the path.
NOT_FOUND = ("not found", "not found: post ", "post : not found")


def note_load_failure(run: Run, decoder: Engine, failure: LoadFailure) -> None:
    gateway, prefiller = run.gateway, run.loads_from
    run.load_failure = failure
    if not failure.is_silent:
        gateway.metrics.load_failures.add(("pair" if failure.is_of_pair else "request",))
    if not failure.is_of_pair or not prefiller:
        return
    pause = gateway.fleet.unreachable_pairs.record_failure(
        prefiller, decoder.name, now(), failure.is_silent
    )
    if pause is not None:
        logger.warning(
            "decode engine %s %s from prefill engine %s (%s), and is paired with others for %.0f "
            "s: %s",
            decoder.name,
            "loaded wrong KV" if failure.is_silent else "cannot load KV",
            prefiller,
            failure.remote,
            pause,
            failure.reason,
        )


async def error_of_answer(
    run: Run,
    engine: Engine,
    answer: EngineAnswer,
    loan: LegLoan | None,
    asked: Body | None = None,
) -> Exception:
    """Return the error for an answer with another status than 200.

    A 4xx goes to the client as it is. `asked`: the client's body, if the engine was asked for one
    token of the client's answer.
    """
    if run.request.decode_only_reason == PASSED:
        # An endpoint that the engine lacks does not count against it.
        body = await answer.read(run.gateway.limits.max_answer_size)
        run.answers_held.keep(answer)
        passed = EngineRejectedError(answer.status, answer.headers, body)
        return (
            _unserved_model(run, engine, passed) or _lacking_endpoint(run, engine, passed) or passed
        )
    if answer.status >= 500:
        body = await _error_body(answer, engine.pool.deadlines)
        failure = failure_in_error(body) if asked is None or loan is not None else None
        if failure is not None:
            if loan is not None:
                loan.note_failure(failure)
                return LoadFailedError(NOT_BORROWED, failure.is_of_pair)
            note_load_failure(run, engine, failure)
            return LoadFailedError(NOT_LOADED, failure.is_of_pair)
    else:
        body = await answer.read(run.gateway.limits.max_answer_size)
        run.answers_held.keep(answer)
        if asked is not None and answer.status == 400:
            body = restate_prompt_limit(body, asked)
        if answer.status >= 400:
            run.gateway.fleet.note_leg_answered(engine)
    status = answer.status
    if status < 400:
        return BrokenAnswerError(f"an answer with status {status}")
    rejected = EngineRejectedError(status, answer.headers, body) if status < 500 else None
    text = f"the {engine.role.engine} answered {status}{error_text(body)}"
    seconds = messages.retry_after(answer.headers) if status in (429, 503) else None
    if seconds is not None:
        return EngineOverloadedError(text, seconds, rejected)
    if rejected is not None:
        return _unserved_model(run, engine, rejected) or rejected
    return (EngineUnavailableError if status == 503 else EngineError)(text)


def _unserved_model(
    run: Run, engine: Engine, rejected: EngineRejectedError
) -> UnservedModelError | None:
    """Return the error for a 404 that says that the engine does not serve the request's model; None
    for any other answer. A 404 may be about an endpoint, too."""
    model = run.request.model
    if rejected.status != 404 or not isinstance(model, str):
        return None
    error = error_in(parse_object(rejected.body) or {})
    if not isinstance(error, dict):
        return None
    message = error.get("message")
    if (
        error.get("param") == "model"
        or error.get("code") == "model_not_found"
        or (isinstance(message, str) and message.startswith(f"The model `{model}` does not exist"))
    ):
        return UnservedModelError(f"{engine.name} does not serve {model[:128]}", rejected)
    return None


def _lacking_endpoint(
    run: Run, engine: Engine, rejected: EngineRejectedError
) -> EngineRejectedError | None:
    """Return the error for a 404 that says no more than Not Found, with the names of the engine and
    of the endpoint that it lacks; None for any other answer."""
    if rejected.status != 404:
        return None
    content = parse_object(rejected.body) or {}
    error = error_in(content)
    reason = error.get("message") if isinstance(error, dict) else content.get("detail")
    path = run.request.path or run.request.record.endpoint
    says = reason.replace(path, "").lower() if isinstance(reason, str) else NOT_FOUND[0]
    if says not in NOT_FOUND:
        return None
    text = f"{engine.role.engine} {engine.name} has no endpoint {path}"
    return EngineRejectedError(404, JSON, error_body(404, type_of_status(404), text))


async def _error_body(answer: EngineAnswer, deadlines: Deadlines) -> bytes:
    """Return the error body of a failed engine, or b"" if it does not arrive soon."""
    try:
        async with TimeLimit(deadlines, now() + ERROR_BODY_TIMEOUT_S):
            return await answer.read(MAX_ERROR_BODY_BYTES)
    except (TimeoutError, UpstreamError):
        return b""
