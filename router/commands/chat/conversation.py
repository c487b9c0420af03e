"""A conversation with a router: each answer is read while it streams."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from uuid import uuid4

import httpx

from router.commands.bench.chats import PATH, ChatError, ChatStreamReader, Figures, Message
from router.commands.connection_errors import no_answer
from router.commands.console import CommandError
from router.commands.router_client import error_message, tls_context
from router.openai.answers import count_in, parse_object

CONNECT_TIMEOUT_S = 10.0
MAX_ERROR_BYTES = 65_536


class ChatAnswer(ChatStreamReader):
    """An answer, while it is read and afterwards. None stands for an unknown fact."""

    def __init__(self) -> None:
        super().__init__(time.monotonic(), Figures())
        self.request_id = ""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def completion_tokens(self) -> int | None:
        return count_in(self.usage, "completion_tokens")

    @property
    def tokens_per_second(self) -> float | None:
        """The pace from the first token on. Without usage, a piece of text counts as one token."""
        count = (self.completion_tokens or len(self.texts)) - 1
        if self.first is None or self.last is None or count < 1 or self.last <= self.first:
            return None
        return count / (self.last - self.first)


@dataclass(slots=True)
class Conversation:
    """The turns so far, which each request repeats. `fields` are those of each request that the
    user chooses, `timeout_s` is the longest pause in an answer.

    A turn that fails is not part of the conversation, so the next one may repeat it.
    """

    url: str
    model: str
    headers: Mapping[str, str]
    fields: Mapping[str, float]
    timeout_s: float
    turns: list[Message] = field(default_factory=list)
    name: str = field(default_factory=lambda: f"chat-{uuid4().hex}")
    answer: ChatAnswer = field(default_factory=ChatAnswer)
    """The latest one."""

    def begin_anew(self) -> Conversation:
        """Return a conversation without turns."""
        return Conversation(self.url, self.model, self.headers, self.fields, self.timeout_s)

    def ask(self, question: str) -> Generator[str]:
        """Yield the answer piece by piece. Raises CommandError.

        If the caller stops early, the conversation keeps the part that was received.
        """
        self.answer = answer = ChatAnswer()
        turns = [*self.turns, {"role": "user", "content": question}]
        try:
            yield from self._stream(turns, answer)
        except (GeneratorExit, KeyboardInterrupt):
            if answer.text:
                self._keep(turns, answer)
            raise
        self._keep(turns, answer)

    def _keep(self, turns: list[Message], answer: ChatAnswer) -> None:
        self.turns = [*turns, {"role": "assistant", "content": answer.text}]

    def _stream(self, turns: list[Message], answer: ChatAnswer) -> Generator[str]:
        """Raises CommandError."""
        body = {
            "model": self.model,
            "messages": turns,
            "conversation_id": self.name,
            **self.fields,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {**self.headers, "content-type": "application/json"}
        timeout = httpx.Timeout(self.timeout_s, connect=CONNECT_TIMEOUT_S)
        try:
            with (
                httpx.Client(verify=tls_context(), trust_env=False, timeout=timeout) as client,
                client.stream(
                    "POST", f"{self.url}{PATH}", content=json.dumps(body), headers=headers
                ) as response,
            ):
                answer.request_id = response.headers.get("x-request-id", "")
                if response.status_code != 200:
                    raise CommandError(f"{response.status_code} {_refusal(response)}".strip())
                count = 0
                for block in response.iter_bytes():
                    answer.write(block)
                    yield "".join(answer.texts[count:])
                    count = len(answer.texts)
            answer.end(time.monotonic())
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            is_connecting = isinstance(error, httpx.ConnectTimeout)
            timeout_s = CONNECT_TIMEOUT_S if is_connecting else self.timeout_s
            raise CommandError(_broken(answer) + no_answer(self.url, error, timeout_s)) from None
        except ChatError as error:
            raise CommandError(f"{_broken(answer)}{error}") from None


def _broken(answer: ChatAnswer) -> str:
    return "the answer broke off: " if answer.text else ""


def _refusal(response: httpx.Response) -> str:
    content = bytearray()
    for block in response.iter_bytes():
        content += block
        if len(content) > MAX_ERROR_BYTES:
            break
    return error_message(parse_object(bytes(content)) or {}) or response.reason_phrase
