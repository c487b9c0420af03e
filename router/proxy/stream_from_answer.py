"""Server-sent events made from a whole answer, as an engine would have streamed it in one go."""

from __future__ import annotations

from typing import Any

from router.common.exact_json import dumps, number
from router.proxy.request import Body

DONE = b"data: [DONE]\n\n"
NOT_IN_CHUNKS = ("choices", "usage", "object", "prompt_logprobs", "prompt_token_ids")
OBJECTS = {
    "chat.completion": "chat.completion.chunk",
    "text_completion": "text_completion",
}


def is_answer(content: Body) -> bool:
    choices = content.get("choices")
    if not isinstance(choices, list) or not choices:
        return False
    return content.get("object") in OBJECTS and all(isinstance(choice, dict) for choice in choices)


def events(answer: Body, request: Body) -> bytes:
    """The whole stream for `answer`, which `is_answer`, with usage where `request` asks for it."""
    head = {name: answer[name] for name in answer if name not in NOT_IN_CHUNKS}
    head["object"] = OBJECTS[answer["object"]]
    options = request.get("stream_options")
    with_usage = isinstance(options, dict) and bool(number(options.get("include_usage")))
    rest: Body = {"usage": None} if with_usage else {}
    chunks = [
        {**head, "choices": [piece], **rest}
        for choice in answer["choices"]
        for piece in _pieces(choice)
    ]
    if with_usage:
        chunks.append({**head, "choices": [], "usage": answer.get("usage")})
    return b"".join(b"data: " + dumps(chunk) + b"\n\n" for chunk in chunks) + DONE


def _pieces(choice: Body) -> list[Body]:
    message = choice.get("message")
    if not isinstance(message, dict):
        return [choice]
    index = choice.get("index", 0)
    said = {name: value for name, value in message.items() if value not in (None, [], "")}
    opening = {"role": said.pop("role", "assistant"), "content": ""}
    if isinstance(said.get("tool_calls"), list):
        said["tool_calls"] = [_numbered(*call) for call in enumerate(said["tool_calls"])]
    rest = {name: value for name, value in choice.items() if name not in ("message", "index")}
    return [
        {"index": index, "delta": opening, "logprobs": None, "finish_reason": None},
        {"index": index, "delta": said, **rest},
    ]


def _numbered(index: int, call: Any) -> Any:
    return {"index": index, **call} if isinstance(call, dict) else call
