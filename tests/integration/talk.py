"""A client's conversations, as it holds them: in token ids, or in a chat's messages."""

import json
from dataclasses import dataclass
from typing import Any

from tests.integration.oracle import Answer, body_of, complete
from tests.integration.processes import Server

TURNS = "disagg_router_conversation_turns_total"


@dataclass(frozen=True)
class Talk:
    """A conversation over /v1/completions in token ids, which can be repeated as they were said."""

    router: Server
    name: str
    stream: bool = False
    options: dict[str, Any] | None = None

    def say(self, prompt: list[int], **fields: Any) -> Answer:
        body = {"conversation_id": self.name, **(self.options or {}), **fields}
        if self.stream:
            return streamed(self.router, prompt, **body)
        return complete(self.router, prompt, **body)


def streamed(server: Server, prompt: list[int], **fields: Any) -> Answer:
    body = body_of(prompt, {"stream": True, **fields})
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    assert "kv_transfer_params" not in response.text
    return Answer.in_events(response.text)


def turns(router: Server, outcome: str) -> float:
    samples = router.metrics().items()
    wanted = f'outcome="{outcome}"'
    return sum(value for name, value in samples if name.startswith(TURNS) and wanted in name)


CHAT: list[Any] = [
    {"role": "system", "content": "You answer in gibberish. " * 40},
    {"role": "user", "content": "What does a prefill engine do, and why?"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def chat(server: Server, messages: list[Any], **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 16, **fields}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


USAGE = {"include_usage": True}


def streamed_chat(server: Server, messages: list[Any], **fields: Any) -> tuple[str, dict[str, Any]]:
    body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 16, **fields}
    text = server.post("/v1/chat/completions", body).text
    events = text.removesuffix("data: [DONE]\n\n").split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if event]
    said = [choice["delta"].get("content") for chunk in chunks for choice in chunk["choices"]]
    return "".join(filter(None, said)), chunks[-1]["usage"]
