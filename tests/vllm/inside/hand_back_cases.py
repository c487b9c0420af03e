"""Where blocks run out, a request is handed back: inside vLLM's own scheduler."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.request import Request

from engine_ext.common.resume_payload import MAX_LOGPROBS, read_resume_payload
from engine_ext.vllm.compat import support
from engine_ext.vllm.optional.answers import PREEMPTION_RETURN
from engine_ext.vllm.optional.answers.patch_requests import prepare
from engine_ext.vllm.optional.answers.resumed_request import CANNOT_RESUME, cannot_resume
from tests.vllm.inside.in_process import Ended, Engine, refusal

SCHEDULERS = tuple(
    f"engine_ext.vllm.scheduler.{name}" for name in ("DisaggScheduler", "DisaggAsyncScheduler")
)
ASKED = {"hand_back": True}
LONG = 40


def crowded(engine: Engine, request: Request) -> Ended:
    """How it ends where there are no more blocks until it has been preempted."""
    engine.add("before", 40, None, LONG)
    engine.step_until(lambda: request.num_output_tokens == 2)
    engine.scheduler.running.sort(key=lambda one: one is request)  # It is the last that came.
    held = engine.pool.get_new_blocks(engine.pool.get_num_free_blocks())
    name = request.request_id
    engine.step_until(lambda: name in engine.ended or request.num_preemptions)
    engine.pool.free_blocks(held)
    ended = engine.run(name)
    assert engine.run("before").reason == "length"
    for _ in range(4):
        if engine.scheduler.has_requests():
            engine.step()
    assert not any(rank.leased for rank in engine.ranks)
    engine.step_until(engine.is_empty)
    return ended


def what_would_be_preempted_is_handed_back(
    scheduler: str, params: dict[str, Any] | None, extra: dict[str, Any], model: Path
) -> None:
    """With what it has said so far; nothing is kept for a next turn."""
    engine = Engine(model, scheduler_cls=scheduler, extra=extra)
    request = engine.add("asked", 50, params, LONG)
    ended = crowded(engine, request)
    assert (ended.reason, ended.tokens) == ("cache_threshold", 0)
    assert ended.params is not None
    assert ended.params.keys() == {"begun"}
    begun = read_resume_payload(ended.params)
    assert begun is not None
    assert list(begun.prompt_token_ids) == list(request.prompt_token_ids or ())
    assert begun.output_token_ids == tuple(request.output_token_ids)
    assert 2 <= len(begun.output_token_ids) < LONG


def a_stream_has_told_its_tokens(scheduler: str, model: Path) -> None:
    engine = Engine(model, scheduler_cls=scheduler)
    request = engine.add("asked", 50, ASKED, LONG)
    assert request.sampling_params is not None
    request.sampling_params.output_kind = RequestOutputKind.DELTA
    ended = crowded(engine, request)
    assert (ended.reason, ended.params) == ("cache_threshold", None)


def what_stays_is_preempted_as_ever(
    scheduler: str, params: Any, extra: dict[str, Any], model: Path
) -> None:
    engine = Engine(model, scheduler_cls=scheduler, extra={"hand_back": True})
    request = engine.add("asked", 50, params, LONG, **extra)
    ended = crowded(engine, request)
    assert ended.reason == "length"
    assert request.num_preemptions == 1


def what_begun_cannot_tell_stays(model: Path) -> None:
    for likeliest in (-1, MAX_LOGPROBS):
        engine = Engine(model, scheduler_cls=SCHEDULERS[0])
        request = engine.add("asked", 50, ASKED, LONG)
        assert request.sampling_params is not None
        request.sampling_params.logprobs = likeliest
        assert crowded(engine, request).reason == "length"


def a_cache_that_is_reset_hands_nothing_back_that_runs_on(model: Path) -> None:
    """Who preempts all lets them go on in the next step."""
    engine = Engine(model, scheduler_cls=SCHEDULERS[0])
    request = engine.add("asked", 50, ASKED, 8)
    engine.step_until(lambda: request.num_output_tokens == 2)
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert engine.run("asked").reason == "length"


def a_request_that_cannot_be_told_is_preempted_as_ever(model: Path) -> None:
    """And no exception ends the engine."""
    engine = Engine(model, scheduler_cls=SCHEDULERS[0])
    request = engine.add("asked", 50, ASKED, LONG)
    request._output_token_ids.append(1 << 30)
    request._all_token_ids.append(1 << 30)
    assert crowded(engine, request).reason == "length"


def what_the_engine_cannot_keep_is_refused_at_start(model: Path) -> None:
    with patch.object(support, "is_installed", lambda feature: feature is not PREEMPTION_RETURN):
        problem = refusal(lambda: Engine(model, scheduler_cls=SCHEDULERS[0], extra=ASKED))
    assert "hand_back" in problem
    problem = refusal(lambda: Engine(model, scheduler_cls=SCHEDULERS[0], extra={"hand_back": 1}))
    assert "hand_back" in problem


def requests_that_go_on_nowhere_else_say_so(model: Path) -> None:
    asked = {"model": "m", "kv_transfer_params": ASKED}
    chat = {**asked, "messages": [{"role": "user", "content": "x"}]}
    for fields, is_to_stay in (({}, False), ({"n": 2}, True), ({"prompt_logprobs": 1}, True)):
        for made in (
            sampled(ChatCompletionRequest(**chat, **fields)),
            sampled(CompletionRequest(**asked, prompt="x", **fields)),
        ):
            assert cannot_resume(made) is is_to_stay, fields
    assert cannot_resume(sampled(CompletionRequest(**asked, prompt=["x", "y"])))
    forged = sampled(ChatCompletionRequest(**chat, vllm_xargs={CANNOT_RESUME: 1, "other": 2}))
    assert CANNOT_RESUME not in forged.extra_args
    assert forged.extra_args["other"] == 2


def sampled(request: Any) -> Any:
    """As the HTTP server does it."""
    prepare(request, None, None)
    return request.to_sampling_params(5, {})


def cases() -> Iterator[tuple[str, Callable[[Path], None]]]:
    for plain in (
        what_begun_cannot_tell_stays,
        a_cache_that_is_reset_hands_nothing_back_that_runs_on,
        a_request_that_cannot_be_told_is_preempted_as_ever,
        what_the_engine_cannot_keep_is_refused_at_start,
        requests_that_go_on_nowhere_else_say_so,
    ):
        yield plain.__name__, plain
    kept = {**ASKED, "retain": True}
    for scheduler in SCHEDULERS:
        for params, extra in ((ASKED, {}), (kept, {}), (None, {"hand_back": True})):
            back = partial(what_would_be_preempted_is_handed_back, scheduler, params, extra)
            yield f"{back.func.__name__}, {scheduler}, {params}", back
        told = partial(a_stream_has_told_its_tokens, scheduler)
        yield f"{told.func.__name__}, {scheduler}", told
        for asks, more in (({"hand_back": False}, {}), (None, {CANNOT_RESUME: True})):
            stayed = partial(what_stays_is_preempted_as_ever, scheduler, asks, more)
            yield f"{stayed.func.__name__}, {scheduler}, {asks}", stayed
