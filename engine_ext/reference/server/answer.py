"""The flow of one answer, whole or streamed, the same for both dialects."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from engine_ext.common import load_failure
from engine_ext.common.resume_payload import ALL, KEY, PREEMPTED, token_id_comment
from engine_ext.reference.engine import merge
from engine_ext.reference.messages import RequestOutput
from engine_ext.reference.resume import handed_back
from engine_ext.reference.server.connection import DONE, event
from engine_ext.reference.server.dialect import AnswerFormat
from engine_ext.reference.server.errors import EngineFailureError
from engine_ext.reference.server.generation import JobTally, Outputs
from engine_ext.reference.server.job import Job
from engine_ext.scheduler.admission import FINISH_REASON


async def whole(dialect: AnswerFormat, outputs: Outputs) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    tally = JobTally(dialect.job)
    pieces: list[list[RequestOutput]] = [[] for _ in tally.choices]
    async with aclosing(outputs):
        async for choice, output in outputs:
            tally.add(choice, output)
            pieces[choice].append(output)
    _check_complete(tally)
    said = [merge(each) for each in pieces]
    params = _handed_back(dialect.job, said[0]) or tally.kv_transfer_params
    if tally.load_failure is not None:
        params = {**(params or {}), load_failure.KEY: tally.load_failure}
    return dialect.answer(
        [dialect.answer_choice(choice, each) for choice, each in enumerate(said)],
        usage=tally.usage(),
        kv_transfer_params=params,
    )


async def streamed(dialect: AnswerFormat, outputs: Outputs) -> AsyncGenerator[bytes, None]:
    """Server-sent events, those that belong to one output in one piece.

    `kv_transfer_params` are in the last chunk before `[DONE]`: that of the usage where the client
    asked for one, else the one that finishes the last choice. Stock vLLM 0.32 never streams them.
    """
    tally = JobTally(dialect.job)
    begun, is_first = dialect.job.num_spoken > 0, True
    async with aclosing(outputs):
        async for choice, output in outputs:
            if not (output.token_ids or output.text or output.finish_reason):
                continue
            opening = [] if begun else [event(chunk) for chunk in dialect.opening()]
            begun = True
            comment, is_first = _told(dialect.job, output, is_first), False
            failed = _failure(tally, output)
            yield b"".join(
                [failed, *opening, comment, event(_chunk(dialect, tally, choice, output))]
            )
    _check_complete(tally)
    yield b"".join(_closing(dialect, tally))


def _handed_back(job: Job, said: RequestOutput) -> dict[str, Any] | None:
    """For another engine, of what no comments have told; only the only choice is."""
    if (said.finish_reason, said.stop_reason) != (FINISH_REASON, PREEMPTED):
        return None
    spoken = job.begun.token_ids[: job.num_spoken] if job.begun else ()
    prompt = job.prompts[0].token_ids
    return {KEY: handed_back(prompt, spoken, said.token_ids, said.logprobs)}


def _told(job: Job, output: RequestOutput, is_first: bool) -> bytes:
    """Of the only choice: where there are more, nobody could go on."""
    if job.options.tell is None or job.num_choices > 1:
        return b""
    names_prompt = is_first and job.options.tell == ALL
    return token_id_comment(
        output.token_ids, job.prompts[0].token_ids if names_prompt else ()
    ).encode()


def _failure(tally: JobTally, output: RequestOutput) -> bytes:
    """Named once, before the first event that knows of it."""
    if output.load_failure is None or tally.load_failure is not None:
        return b""
    return load_failure.comment(output.load_failure).encode()


def _chunk(
    dialect: AnswerFormat, tally: JobTally, choice: int, output: RequestOutput
) -> dict[str, Any]:
    entry = dialect.chunk_choice(choice, output, first=not tally.choices[choice].begun)
    tally.add(choice, output)
    options = dialect.job.options
    rest: dict[str, Any] = {}
    if options.include_usage:
        rest["usage"] = tally.usage_of(choice) if options.continuous_usage else None
    elif tally.all_finished:
        rest = _parting(tally)
    return dialect.chunk([entry], **rest)


def _closing(dialect: AnswerFormat, tally: JobTally) -> Iterator[bytes]:
    if dialect.job.options.include_usage:
        yield event(dialect.chunk([], usage=tally.usage(), **_parting(tally)))
    yield DONE


def _parting(tally: JobTally) -> dict[str, Any]:
    params = tally.kv_transfer_params
    return {} if params is None else {"kv_transfer_params": params}


def _check_complete(tally: JobTally) -> None:
    if not tally.all_finished:
        raise EngineFailureError("the engine ended without finishing this request")
