"""Translate Anthropic's Messages API to chat completions, and the answers back. Pure.

https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from router.common.exact_json import dumps, loads
from router.openai.answer_blocks import AnswerBlock, AnswerBlocks, BlockKind, BlockStep, StepKind
from router.openai.answers import Json
from router.openai.request_fields import (
    field_error,
    join_text_parts,
    require_object,
    require_objects,
    require_text,
    start_chat,
    unsupported_type,
)

MESSAGES_PATH, COUNT_TOKENS_PATH = "/v1/messages", "/v1/messages/count_tokens"
# Fields that are translated or that have no meaning for an engine; all others are forwarded.
# fmt: off
TRANSLATED_FIELDS = frozenset((
    "cache_control", "container", "context_management", "inference_geo", "mcp_servers",
    "messages", "metadata", "output_config", "service_tier", "stop_sequences", "stream",
    "system", "thinking", "tool_choice", "tools",
))
# fmt: on
UNSUPPORTED_FIELDS = ("container", "mcp_servers", "context_management")
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
STOP_REASONS = {
    "stop": "end_turn",
    "function_call": "tool_use",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}


def chat_from_messages(body: Json) -> Json:
    """Return the chat completion request for a message request. Raises BadRequestError."""
    if "max_tokens" not in body:
        raise field_error("max_tokens", "Field required")
    return _translate_request(body)


def count_request_from_messages(body: Json) -> Json:
    """Return the /tokenize request that counts a message's tokens. Raises BadRequestError."""
    chat = _translate_request(body)
    return {name: chat[name] for name in ("model", "messages", "tools") if name in chat}


def _translate_request(body: Json) -> Json:
    chat = start_chat(body, TRANSLATED_FIELDS, UNSUPPORTED_FIELDS, _tool)
    chat["messages"] = [*_system(body.get("system")), *_history(body.get("messages"))]
    if body.get("stop_sequences") is not None:
        chat["stop"] = body["stop_sequences"]
    user = body.get("metadata")
    if isinstance(user, dict) and isinstance(user.get("user_id"), str):
        chat["user"] = user["user_id"]
    if body.get("output_config") is not None:
        _set_output(chat, require_object(body["output_config"], "output_config"))
    if body.get("tool_choice") is not None and (body.get("tools")):
        _choose(chat, require_object(body["tool_choice"], "tool_choice"))
    return chat


def _set_output(chat: Json, config: Json) -> None:
    if isinstance(config.get("effort"), str):
        chat["reasoning_effort"] = config["effort"]
    output = config.get("format")
    if isinstance(output, dict) and output.get("type") == "json_schema":
        schema = {"name": "output", "schema": output.get("schema")}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}


def _choose(chat: Json, choice: Json) -> None:
    kind = choice.get("type")
    if kind == "tool":
        name = require_text(choice.get("name"), "tool_choice.name")
        chat["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif isinstance(kind, str) and kind in TOOL_CHOICES:
        chat["tool_choice"] = TOOL_CHOICES[kind]
    else:
        raise unsupported_type("tool_choice", "choices", kind)
    if choice.get("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False


def _tool(tool: Json, where: str) -> Json:
    if tool.get("type") not in (None, "custom"):
        raise unsupported_type(where, "tools", tool.get("type"))
    function: Json = {"name": require_text(tool.get("name"), f"{where}.name")}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    function["parameters"] = require_object(tool.get("input_schema"), f"{where}.input_schema")
    return {"type": "function", "function": function}


def _system(system: object) -> Iterator[Json]:
    if system is None or system == "":
        return
    if not isinstance(system, str):
        parts = require_objects(system, "system")
        system = "\n".join(
            require_text(part.get("text"), f"system[{number}].text")
            for number, part in enumerate(parts)
        )
    yield {"role": "system", "content": system}


def _history(messages: object) -> Iterator[Json]:
    if not messages:
        raise field_error("messages", "at least one message is required")
    for number, message in enumerate(require_objects(messages, "messages")):
        where = f"messages[{number}]"
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise field_error(f"{where}.role", "must be user, assistant or system")
        if isinstance(content, str):
            yield {"role": role, "content": content}
            continue
        blocks = require_objects(content, f"{where}.content")
        if not blocks and role != "assistant":
            raise field_error(f"{where}.content", "at least one block is required")
        placed = [(block, f"{where}.content[{n}]") for n, block in enumerate(blocks)]
        if role == "assistant":
            yield _assistant_message(placed)
        else:
            yield from _user_messages(placed, role)


def _assistant_message(blocks: list[tuple[Json, str]]) -> Json:
    """Translate blocks of the assistant. Chat templates leave reasoning out, so it is dropped."""
    texts: list[str] = []
    calls: list[Json] = []
    for block, where in blocks:
        match block.get("type"):
            case "text":
                texts.append(require_text(block.get("text"), f"{where}.text"))
            case "tool_use":
                calls.append(_call(block, where))
            case "thinking" | "redacted_thinking":
                pass
            case kind:
                raise unsupported_type(where, "blocks of an assistant", kind)
    message: Json = {"role": "assistant", "content": "".join(texts) if texts else None}
    return {**message, "tool_calls": calls} if calls else {**message, "content": "".join(texts)}


def _call(block: Json, where: str) -> Json:
    arguments = require_object(block.get("input", {}), f"{where}.input")
    name = require_text(block.get("name"), f"{where}.name")
    return {
        "id": require_text(block.get("id"), f"{where}.id"),
        "type": "function",
        "function": {"name": name, "arguments": _dump(arguments, where)},
    }


def _user_messages(blocks: list[tuple[Json, str]], role: str) -> Iterator[Json]:
    """Translate blocks of the user. Tool results come first, as messages of their own."""
    parts: list[Json] = []
    for block, where in blocks:
        if block.get("type") == "tool_result":
            result, images = _result(block, where)
            yield result
            parts += images
        else:
            parts.append(_part(block, where))
    if parts:
        yield {"role": role, "content": join_text_parts(parts)}


def _result(block: Json, where: str) -> tuple[Json, list[Json]]:
    """Return a tool's message, and its images, which chats accept only in user messages."""
    content = block.get("content")
    given = {
        "role": "tool",
        "tool_call_id": require_text(block.get("tool_use_id"), f"{where}.tool_use_id"),
    }
    if content is None or isinstance(content, str):
        return {**given, "content": content or ""}, []
    blocks = require_objects(content, f"{where}.content")
    parts = [_part(one, f"{where}.content[{n}]") for n, one in enumerate(blocks)]
    texts = [part["text"] for part in parts if part["type"] == "text"]
    images = [part for part in parts if part["type"] != "text"]
    return {**given, "content": "\n".join(texts)}, images


def _part(block: Json, where: str) -> Json:
    match block.get("type"):
        case "text":
            return {"type": "text", "text": require_text(block.get("text"), f"{where}.text")}
        case "image":
            url = _url(require_object(block.get("source"), f"{where}.source"), f"{where}.source")
            return {"type": "image_url", "image_url": {"url": url}}
        case kind:
            raise unsupported_type(where, "blocks", kind)


def _url(source: Json, where: str) -> str:
    match source.get("type"):
        case "url":
            return require_text(source.get("url"), f"{where}.url")
        case "base64":
            kind = require_text(source.get("media_type"), f"{where}.media_type")
            return f"data:{kind};base64,{require_text(source.get('data'), f'{where}.data')}"
        case kind:
            raise unsupported_type(where, "sources", kind)


def _dump(content: Json, where: str) -> str:
    try:
        return dumps(content).decode()
    except orjson.JSONEncodeError:
        raise field_error(where, "nested too deep") from None


# Answers.


def anthropic_error(status: int, error: Json) -> Json:
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error.get("message", ""))}}


class MessageOutput:
    """Writes an answer as a message with the id `name`, whole or as a stream of events."""

    def __init__(self, answer: AnswerBlocks, name: str, model: str) -> None:
        self._answer, self._name, self._model = answer, name, model
        self._has_begun = False

    def whole(self) -> Json:
        answer = self._answer
        reason, sequence = _stop_reason(answer)
        return {
            **_opening(self._name, answer.model or self._model),
            "content": [_content(block) for block in answer.blocks],
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": _usage(answer),
        }

    def events(self, steps: Iterable[BlockStep]) -> Iterator[bytes]:
        for step in steps:
            yield from self._begin()
            number = {"index": step.block.number}
            if step.kind is StepKind.BEGIN:
                yield _event("content_block_start", content_block=_empty(step.block), **number)
            elif step.kind is StepKind.EXTEND:
                yield _event("content_block_delta", delta=_delta(step), **number)
            else:
                yield _event("content_block_stop", **number)

    def last_events(self) -> Iterator[bytes]:
        """Yield the last events, after the answer was closed."""
        answer = self._answer
        if answer.error is not None:
            status = answer.error.get("code")
            event = anthropic_error(status if type(status) is int else 500, answer.error)
            yield _event("error", error=event["error"])
            return
        yield from self._begin()
        reason, sequence = _stop_reason(answer)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        yield _event("message_delta", delta=delta, usage=_usage(answer))
        yield _event("message_stop")

    def _begin(self) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            opening = _opening(self._name, self._answer.model or self._model)
            empty: Json = {"content": [], "stop_reason": None, "stop_sequence": None}
            yield _event(
                "message_start", message={**opening, **empty, "usage": _usage(AnswerBlocks())}
            )


def _opening(name: str, model: str) -> Json:
    return {"id": name, "type": "message", "role": "assistant", "model": model}


def _content(block: AnswerBlock) -> Json:
    match block.kind:
        case BlockKind.REASONING:
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case BlockKind.TEXT:
            return {"type": "text", "text": block.text}
        case BlockKind.TOOL_CALL:
            return {**_empty(block), "input": _arguments(block.text)}


def _empty(block: AnswerBlock) -> Json:
    match block.kind:
        case BlockKind.REASONING:
            return {"type": "thinking", "thinking": "", "signature": ""}
        case BlockKind.TEXT:
            return {"type": "text", "text": ""}
        case BlockKind.TOOL_CALL:
            name = block.id or f"toolu_{block.number}"
            return {"type": "tool_use", "id": name, "name": block.name, "input": {}}


def _delta(step: BlockStep) -> Json:
    match step.block.kind:
        case BlockKind.REASONING:
            return {"type": "thinking_delta", "thinking": step.text}
        case BlockKind.TEXT:
            return {"type": "text_delta", "text": step.text}
        case BlockKind.TOOL_CALL:
            return {"type": "input_json_delta", "partial_json": step.text}


def _arguments(written: str) -> Json:
    """Parse a tool call's arguments. Text that is not a JSON object is returned under a key."""
    try:
        read = loads(written.encode("utf-8", "surrogatepass") or b"{}")
    except orjson.JSONDecodeError:
        return {"INVALID_JSON": written}
    return read if isinstance(read, dict) else {"INVALID_JSON": written}


def _stop_reason(answer: AnswerBlocks) -> tuple[str, str | None]:
    if (
        answer.finish_reason == "stop"
        and isinstance(answer.stop_reason, str)
        and not answer.has_tool_calls
    ):
        return "stop_sequence", answer.stop_reason
    if answer.finish_reason == "stop" and answer.has_tool_calls:
        return "tool_use", None
    return STOP_REASONS.get(answer.finish_reason or "", "end_turn"), None


def _usage(answer: AnswerBlocks) -> Json:
    """Return the usage; Anthropic does not count cached tokens as input tokens."""
    usage = answer.usage
    return {
        "input_tokens": max(0, usage.prompt - usage.cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.answer,
    }


def _event(kind: str, **fields: Any) -> bytes:
    content = dumps({"type": kind, **fields})
    return b"event: %b\ndata: %b\n\n" % (kind.encode("ascii"), content)
