"""Makes a stream of server-sent events from a complete answer, as if an engine had streamed it."""

from __future__ import annotations

from router.common.exact_json import dumps, number
from router.openai.answers import Json

DONE = b"data: [DONE]\n\n"
FIELDS_NOT_IN_CHUNKS = ("choices", "usage", "object", "prompt_logprobs", "prompt_token_ids")
# The `object` of a chunk, by the `object` of the complete answer.
CHUNK_OBJECTS = {
    "chat.completion": "chat.completion.chunk",
    "text_completion": "text_completion",
}


def is_answer(content: Json) -> bool:
    """Return True if the content is a chat completion or a completion with choices."""
    choices = content.get("choices")
    if not isinstance(choices, list) or not choices:
        return False
    return content.get("object") in CHUNK_OBJECTS and all(
        isinstance(choice, dict) for choice in choices
    )


def events(answer: Json, request: Json) -> bytes:
    """Return the complete stream for an answer for which `is_answer` is true.

    The stream ends with a usage chunk if the body of the request asks for one.
    """
    head = {name: answer[name] for name in answer if name not in FIELDS_NOT_IN_CHUNKS}
    head["object"] = CHUNK_OBJECTS[answer["object"]]
    options = request.get("stream_options")
    with_usage = isinstance(options, dict) and bool(number(options.get("include_usage")))
    common: Json = {"usage": None} if with_usage else {}
    chunks = [
        {**head, "choices": [piece], **common}
        for choice in answer["choices"]
        for piece in _pieces(choice)
    ]
    if with_usage:
        chunks.append({**head, "choices": [], "usage": answer.get("usage")})
    return b"".join(b"data: " + dumps(chunk) + b"\n\n" for chunk in chunks) + DONE


def _pieces(choice: Json) -> list[Json]:
    message = choice.get("message")
    if not isinstance(message, dict):
        return [choice]
    index = choice.get("index", 0)
    delta = {name: value for name, value in message.items() if value not in (None, [], "")}
    opening = {"role": delta.pop("role", "assistant"), "content": ""}
    if isinstance(delta.get("tool_calls"), list):
        delta["tool_calls"] = [
            {"index": number, **call} if isinstance(call, dict) else call
            for number, call in enumerate(delta["tool_calls"])
        ]
    rest = {name: value for name, value in choice.items() if name not in ("message", "index")}
    return [
        {"index": index, "delta": opening, "logprobs": None, "finish_reason": None},
        {"index": index, "delta": delta, **rest},
    ]
