"""The two shapes of an answer: text completions and chat completions, as vLLM writes them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from engine_ext.common.resume_payload import LOWEST
from engine_ext.reference.messages import RequestOutput, TokenLogprob
from engine_ext.reference.server.job import Job
from engine_ext.reference.server.structured_output import Calls, calls_in
from engine_ext.reference.tokenizer import Tokenizer


class AnswerFormat(ABC):
    chunk_object: ClassVar[str]
    answer_object: ClassVar[str]

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self.job = job
        self._tokenizer = tokenizer

    @abstractmethod
    def opening(self) -> Iterator[dict[str, Any]]:
        """The chunks before any token."""

    @abstractmethod
    def chunk_choice(self, choice: int, output: RequestOutput, *, first: bool) -> dict[str, Any]:
        """The `choices` entry of a chunk. `first`: it is the choice's first with anything in it."""

    @abstractmethod
    def answer_choice(self, choice: int, output: RequestOutput) -> dict[str, Any]:
        """The `choices` entry of a whole answer."""

    def chunk(self, choices: list[dict[str, Any]], **rest: Any) -> dict[str, Any]:
        job = self.job
        head = {"id": job.id, "object": self.chunk_object, "created": job.created}
        return {**head, "model": job.model, "choices": choices, **rest}

    def answer(self, choices: list[dict[str, Any]], **rest: Any) -> dict[str, Any]:
        shared = {"service_tier": None, "system_fingerprint": None}
        return {**self.chunk(choices), "object": self.answer_object, **shared, **rest}

    def _name(self, token_id: int) -> str:
        return self._name_bytes(token_id).decode(errors="replace")

    def _name_bytes(self, token_id: int) -> bytes:
        if self.job.request.return_tokens_as_token_ids:
            return f"token_id:{token_id}".encode()
        return self._tokenizer.token_bytes(token_id)

    def _token_ids(self, output: RequestOutput) -> list[int] | None:
        return list(output.token_ids) if self.job.request.return_token_ids else None

    def _prompt_token_ids(self, choice: int) -> list[int] | None:
        return list(self.job.prompt_of(choice)) if self.job.request.return_token_ids else None


class CompletionDialect(AnswerFormat):
    chunk_object = "text_completion"
    answer_object = "text_completion"

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        super().__init__(job, tokenizer)
        sent = job.resumed.token_ids[: job.num_sent] if job.resumed else ()
        self._offsets = [sum(len(self._name(token)) for token in sent)] * job.num_choices
        """Where the next token of each choice begins, in characters of token names."""

    def opening(self) -> Iterator[dict[str, Any]]:
        return iter(())

    def chunk_choice(self, choice: int, output: RequestOutput, *, first: bool) -> dict[str, Any]:
        return {
            "index": choice,
            "text": output.text,
            "logprobs": self._logprobs(choice, output),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "prompt_token_ids": self._prompt_token_ids(choice) if first else None,
            "token_ids": self._token_ids(output),
        }

    def answer_choice(self, choice: int, output: RequestOutput) -> dict[str, Any]:
        entry = self.chunk_choice(choice, output, first=True)
        return {**entry, "prompt_logprobs": None}

    def _logprobs(self, choice: int, output: RequestOutput) -> dict[str, Any] | None:
        if self.job.sampling.logprobs is None:
            return None
        tokens = [self._name(entry.token_id) for entry in output.logprobs]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[choice])
            self._offsets[choice] += len(token)
        return {
            "text_offset": offsets,
            "token_logprobs": [max(entry.logprob, LOWEST) for entry in output.logprobs],
            "tokens": tokens,
            "top_logprobs": [self._top(entry) for entry in output.logprobs],
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The chosen token first, then the best ones. Of tokens with one name the best stays."""
        top = {self._name(entry.token_id): max(entry.logprob, LOWEST)}
        for token_id, logprob in entry.top:
            top.setdefault(self._name(token_id), max(logprob, LOWEST))
        return top


class ChatDialect(AnswerFormat):
    chunk_object = "chat.completion.chunk"
    answer_object = "chat.completion"

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        super().__init__(job, tokenizer)
        self._calls = [Calls(job.forced) for _ in range(job.num_choices)] if job.forced else []
        self._sent_text = job.resumed.sent_text if job.resumed else ""
        if job.num_sent:
            for calls in self._calls:
                calls.take(self._sent_text)

    def opening(self) -> Iterator[dict[str, Any]]:
        prompt = self._prompt_token_ids(0)
        extra = {} if prompt is None else {"prompt_token_ids": prompt}
        for choice in range(self.job.num_choices):
            delta = {"role": "assistant", "content": ""}
            entry = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}
            yield self.chunk([entry], **extra)

    def chunk_choice(self, choice: int, output: RequestOutput, *, first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": output.text}
        if self._calls:
            calls = self._calls[choice].take(output.text)
            delta = {"tool_calls": calls} if calls else {}
        entry = {
            "index": choice,
            "delta": delta,
            "logprobs": self._logprobs(output),
            "finish_reason": self._finish_reason(output),
            "token_ids": self._token_ids(output),
        }
        stop = {} if output.finish_reason is None else {"stop_reason": output.stop_reason}
        return entry | stop

    def answer_choice(self, choice: int, output: RequestOutput) -> dict[str, Any]:
        forced = self.job.forced
        # No message holds half a call: the part that the client has is repeated.
        calls = calls_in(self._sent_text + output.text, forced) if forced else []
        return {
            "index": choice,
            "message": {
                "role": "assistant",
                "content": "" if forced else output.text,
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "tool_calls": calls,
                "reasoning": None,
            },
            "logprobs": self._logprobs(output),
            "finish_reason": self._finish_reason(output),
            "stop_reason": output.stop_reason,
            "token_ids": self._token_ids(output),
        }

    def answer(self, choices: list[dict[str, Any]], **rest: Any) -> dict[str, Any]:
        prompt = {"prompt_logprobs": None, "prompt_token_ids": self._prompt_token_ids(0)}
        return super().answer(choices, **prompt, **rest)

    def _finish_reason(self, output: RequestOutput) -> str | None:
        """As OpenAI has it: the call of a tool that was named ends with "stop"."""
        forced = self.job.forced
        if forced is None or forced.name is not None or output.finish_reason != "stop":
            return output.finish_reason
        return "tool_calls"

    def _logprobs(self, output: RequestOutput) -> dict[str, Any] | None:
        if self.job.sampling.logprobs is None:
            return None
        content = []
        for entry in output.logprobs:
            top = [self._token(*alternative) for alternative in entry.top]
            content.append({**self._token(entry.token_id, entry.logprob), "top_logprobs": top})
        return {"content": content}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        name = self._name_bytes(token_id)
        return {
            "token": name.decode(errors="replace"),
            "logprob": max(logprob, LOWEST),
            "bytes": list(name),
        }
