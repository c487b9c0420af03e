"""The two shapes of an answer: text completions and chat completions, as vLLM writes them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from engine_ext.reference.messages import RequestOutput, TokenLogprob
from engine_ext.reference.server.job import Job
from engine_ext.reference.server.structured_output import Calls, Forced, calls_in
from engine_ext.reference.tokenizer import Tokenizer

LOWEST = -9999.0
"""JSON has no infinity; OpenAI and vLLM write this."""


class TokenNames:
    """How a token is written: its text, or `token_id:<id>` where the client wants that."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def __call__(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        return self._tokenizer.token_bytes(token_id).decode(errors="replace")

    def content(self, token_id: int) -> list[int]:
        if self._as_ids:
            return list(self(token_id).encode())
        return list(self._tokenizer.token_bytes(token_id))


def completion_logprobs(
    logprobs: Sequence[TokenLogprob], names: TokenNames, offset: int
) -> dict[str, Any]:
    """`offset`: characters of the answer before the first of these tokens."""
    tokens = [names(entry.token_id) for entry in logprobs]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "text_offset": offsets,
        "token_logprobs": [max(entry.logprob, LOWEST) for entry in logprobs],
        "tokens": tokens,
        "top_logprobs": [_top(entry, names) for entry in logprobs],
    }


def _top(entry: TokenLogprob, names: TokenNames) -> dict[str, float]:
    """The chosen token first, then the best ones. Of tokens with one name the best stays."""
    top = {names(entry.token_id): max(entry.logprob, LOWEST)}
    for token_id, logprob in entry.top:
        top.setdefault(names(token_id), max(logprob, LOWEST))
    return top


def chat_logprobs(logprobs: Sequence[TokenLogprob], names: TokenNames) -> dict[str, Any]:
    return {
        "content": [
            {
                **_chat_token(entry.token_id, entry.logprob, names),
                "top_logprobs": [_chat_token(*alternative, names) for alternative in entry.top],
            }
            for entry in logprobs
        ]
    }


def _chat_token(token_id: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    return {
        "token": names(token_id),
        "logprob": max(logprob, LOWEST),
        "bytes": names.content(token_id),
    }


class AnswerFormat(ABC):
    chunk_object: ClassVar[str]
    answer_object: ClassVar[str]

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self.job = job
        self.names = TokenNames(tokenizer, as_ids=job.options.tokens_as_ids)

    @abstractmethod
    def opening(self) -> Iterator[dict[str, Any]]:
        """What chunks hold that come before any token."""

    @abstractmethod
    def chunk_choice(self, choice: int, output: RequestOutput, *, first: bool) -> dict[str, Any]:
        """The `choices` entry of a chunk. `first`: it is the choice's first with anything in it."""

    @abstractmethod
    def answer_choice(self, choice: int, output: RequestOutput) -> dict[str, Any]:
        """The `choices` entry of a whole answer."""

    @abstractmethod
    def answer_fields(self) -> dict[str, Any]:
        """Members of a whole answer that only this dialect has."""

    def chunk(self, choices: list[dict[str, Any]], **rest: Any) -> dict[str, Any]:
        return self._envelope(self.chunk_object, choices, rest)

    def answer(self, choices: list[dict[str, Any]], **rest: Any) -> dict[str, Any]:
        shared = {"service_tier": None, "system_fingerprint": None}
        return self._envelope(
            self.answer_object, choices, {**shared, **self.answer_fields(), **rest}
        )

    def _envelope(
        self, kind: str, choices: list[dict[str, Any]], rest: dict[str, Any]
    ) -> dict[str, Any]:
        job = self.job
        head = {"id": job.id, "object": kind, "created": job.created, "model": job.model}
        return {**head, "choices": choices, **rest}

    def _token_ids(self, output: RequestOutput) -> list[int] | None:
        return list(output.token_ids) if self.job.options.return_token_ids else None

    def _prompt_token_ids(self, choice: int) -> list[int] | None:
        if not self.job.options.return_token_ids:
            return None
        return list(self.job.prompt_of(choice).token_ids)


class CompletionDialect(AnswerFormat):
    chunk_object = "text_completion"
    answer_object = "text_completion"

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        super().__init__(job, tokenizer)
        spoken = job.begun.token_ids[: job.num_spoken] if job.begun else ()
        self._offsets = [sum(len(self.names(token)) for token in spoken)] * job.num_choices
        """Where the next token of each choice begins: a token counts as it is spelled here."""

    def opening(self) -> Iterator[dict[str, Any]]:
        return iter(())

    def chunk_choice(self, choice: int, output: RequestOutput, *, first: bool) -> dict[str, Any]:
        echo = self.job.prompt_of(choice).echo
        return {
            "index": choice,
            "text": echo + output.text if first else output.text,
            "logprobs": self._logprobs(choice, output),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "prompt_token_ids": self._prompt_token_ids(choice) if first else None,
            "token_ids": self._token_ids(output),
        }

    def answer_choice(self, choice: int, output: RequestOutput) -> dict[str, Any]:
        entry = self.chunk_choice(choice, output, first=True)
        return {**entry, "prompt_logprobs": None}

    def answer_fields(self) -> dict[str, Any]:
        return {}

    def _logprobs(self, choice: int, output: RequestOutput) -> dict[str, Any] | None:
        if self.job.options.logprobs is None:
            return None
        written = completion_logprobs(output.logprobs, self.names, self._offsets[choice])
        self._offsets[choice] += sum(map(len, written["tokens"]))
        return written


class ChatDialect(AnswerFormat):
    chunk_object = "chat.completion.chunk"
    answer_object = "chat.completion"

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        super().__init__(job, tokenizer)
        self._forced = forced = job.options.forced
        self._calls = [] if forced is None else [Calls(forced) for _ in range(job.num_choices)]
        self._spoken = job.begun.spoken_text if job.begun else ""
        for calls in self._calls if job.num_spoken else ():
            calls.take(self._spoken)

    def opening(self) -> Iterator[dict[str, Any]]:
        prompt = self._prompt_token_ids(0)
        extra = {} if prompt is None else {"prompt_token_ids": prompt}
        for choice in range(self.job.num_choices):
            delta = {"role": self.job.options.role, "content": ""}
            entry = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}
            yield self.chunk([entry], **extra)

    def chunk_choice(self, choice: int, output: RequestOutput, *, first: bool) -> dict[str, Any]:
        entry = {
            "index": choice,
            "delta": self._delta(choice, output.text),
            "logprobs": self._logprobs(output),
            "finish_reason": self._finish_reason(output),
            "token_ids": self._token_ids(output),
        }
        return (
            entry if output.finish_reason is None else {**entry, "stop_reason": output.stop_reason}
        )

    def _delta(self, choice: int, text: str) -> dict[str, Any]:
        if self._forced is None:
            return {"content": text}
        calls = self._calls[choice].take(text)
        return {"tool_calls": calls} if calls else {}

    def _finish_reason(self, output: RequestOutput) -> str | None:
        """As OpenAI has it: a call of a tool that was named is no reason."""
        if self._forced is None or self._forced.name is not None or output.finish_reason != "stop":
            return output.finish_reason
        return "tool_calls"

    def answer_choice(self, choice: int, output: RequestOutput) -> dict[str, Any]:
        forced = self._forced
        return {
            "index": choice,
            "message": {
                "role": self.job.options.role,
                "content": output.text if forced is None else "",
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "tool_calls": [] if forced is None else self._whole_calls(output.text, forced),
                "reasoning": None,
            },
            "logprobs": self._logprobs(output),
            "finish_reason": self._finish_reason(output),
            "stop_reason": output.stop_reason,
            "token_ids": self._token_ids(output),
        }

    def _whole_calls(self, text: str, forced: Forced) -> list[dict[str, Any]]:
        """No message holds half a call: what the client has of one is told again."""
        return calls_in(self._spoken + text, forced)

    def answer_fields(self) -> dict[str, Any]:
        return {"prompt_logprobs": None, "prompt_token_ids": self._prompt_token_ids(0)}

    def _logprobs(self, output: RequestOutput) -> dict[str, Any] | None:
        if self.job.options.logprobs is None:
            return None
        return chat_logprobs(output.logprobs, self.names)
