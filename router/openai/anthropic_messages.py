"""Anthropic's Messages: a request as a chat, and a chat's answer as a message. Pure.

https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from router.common.exact_json import dumps, loads
from router.openai.answer_blocks import Block, Does, Kind, Step, Story
from router.openai.answers import Json
from router.openai.field_checks import items, mapping, plain, text, unknown, wrong

PATH, COUNT_PATH = "/v1/messages", "/v1/messages/count_tokens"
# Read here, or without a meaning for an engine; anything else goes to it as it is.
CONSUMED = frozenset(
    (
        "cache_control",
        "container",
        "context_management",
        "inference_geo",
        "mcp_servers",
        "messages",
        "metadata",
        "output_config",
        "service_tier",
        "stop_sequences",
        "stream",
        "system",
        "thinking",
        "tool_choice",
        "tools",
    )
)
UNSUPPORTED = ("container", "mcp_servers", "context_management")
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
STOPS = {
    "stop": "end_turn",
    "function_call": "tool_use",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}


def chat_of(asked: Json) -> Json:
    """Raises BadRequestError."""
    if "max_tokens" not in asked:
        raise wrong("max_tokens", "Field required")
    return _without_end(asked)


def chat_to_count(asked: Json) -> Json:
    """What /tokenize is asked, to count what the message would. Raises BadRequestError."""
    chat = _without_end(asked)
    return {name: chat[name] for name in ("model", "messages", "tools") if name in chat}


def _without_end(asked: Json) -> Json:
    for name in UNSUPPORTED:
        if asked.get(name):
            raise wrong(name, "is not supported")
    chat: Json = {name: asked[name] for name in asked if name not in CONSUMED}
    chat["messages"] = [*_system(asked.get("system")), *_history(asked.get("messages"))]
    if asked.get("stop_sequences") is not None:
        chat["stop"] = asked["stop_sequences"]
    if asked.get("stream"):
        chat["stream"], chat["stream_options"] = asked["stream"], {"include_usage": True}
    user = asked.get("metadata")
    if isinstance(user, dict) and isinstance(user.get("user_id"), str):
        chat["user"] = user["user_id"]
    if asked.get("output_config") is not None:
        _set_output(chat, mapping(asked["output_config"], "output_config"))
    if asked.get("tools"):
        tools = items(asked["tools"], "tools")
        chat["tools"] = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools)]
    if asked.get("tool_choice") is not None and (asked.get("tools")):
        _choose(chat, mapping(asked["tool_choice"], "tool_choice"))
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
        name = text(choice.get("name"), "tool_choice.name")
        chat["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif isinstance(kind, str) and kind in CHOICES:
        chat["tool_choice"] = CHOICES[kind]
    else:
        raise unknown("tool_choice", "choices", kind)
    if choice.get("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False


def _tool(tool: Json, where: str) -> Json:
    if tool.get("type") not in (None, "custom"):
        raise unknown(where, "tools", tool.get("type"))
    function: Json = {"name": text(tool.get("name"), f"{where}.name")}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    function["parameters"] = mapping(tool.get("input_schema"), f"{where}.input_schema")
    return {"type": "function", "function": function}


def _system(system: object) -> Iterator[Json]:
    if system is None or system == "":
        return
    if not isinstance(system, str):
        parts = items(system, "system")
        system = "\n".join(
            text(part.get("text"), f"system[{number}].text") for number, part in enumerate(parts)
        )
    yield {"role": "system", "content": system}


def _history(messages: object) -> Iterator[Json]:
    if not messages:
        raise wrong("messages", "at least one message is required")
    for number, message in enumerate(items(messages, "messages")):
        where = f"messages[{number}]"
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise wrong(f"{where}.role", "must be user, assistant or system")
        if isinstance(content, str):
            yield {"role": role, "content": content}
            continue
        blocks = items(content, f"{where}.content")
        if not blocks and role != "assistant":
            raise wrong(f"{where}.content", "at least one block is required")
        placed = [(block, f"{where}.content[{n}]") for n, block in enumerate(blocks)]
        yield from _said(placed) if role == "assistant" else _asked(placed, role)


def _said(blocks: list[tuple[Json, str]]) -> Iterator[Json]:
    """By the assistant. What it thought is not sent back: templates leave it out."""
    texts: list[str] = []
    calls: list[Json] = []
    for block, where in blocks:
        match block.get("type"):
            case "text":
                texts.append(text(block.get("text"), f"{where}.text"))
            case "tool_use":
                calls.append(_call(block, where))
            case "thinking" | "redacted_thinking":
                pass
            case kind:
                raise unknown(where, "blocks of an assistant", kind)
    message: Json = {"role": "assistant", "content": "".join(texts) if texts else None}
    yield {**message, "tool_calls": calls} if calls else {**message, "content": "".join(texts)}


def _call(block: Json, where: str) -> Json:
    arguments = mapping(block.get("input", {}), f"{where}.input")
    name = text(block.get("name"), f"{where}.name")
    return {
        "id": text(block.get("id"), f"{where}.id"),
        "type": "function",
        "function": {"name": name, "arguments": _written(arguments, where)},
    }


def _asked(blocks: list[tuple[Json, str]], role: str) -> Iterator[Json]:
    """By the user, who also says what tools answered: that comes first, as chats have it."""
    parts: list[Json] = []
    for block, where in blocks:
        if block.get("type") == "tool_result":
            told, images = _result(block, where)
            yield told
            parts += images
        else:
            parts.append(_part(block, where))
    if parts:
        yield {"role": role, "content": plain(parts)}


def _result(block: Json, where: str) -> tuple[Json, list[Json]]:
    """What a tool said, and the images in it, which chats take from users alone."""
    content = block.get("content")
    given = {"role": "tool", "tool_call_id": text(block.get("tool_use_id"), f"{where}.tool_use_id")}
    if content is None or isinstance(content, str):
        return {**given, "content": content or ""}, []
    blocks = items(content, f"{where}.content")
    parts = [_part(one, f"{where}.content[{n}]") for n, one in enumerate(blocks)]
    texts = [part["text"] for part in parts if part["type"] == "text"]
    images = [part for part in parts if part["type"] != "text"]
    return {**given, "content": "\n".join(texts)}, images


def _part(block: Json, where: str) -> Json:
    match block.get("type"):
        case "text":
            return {"type": "text", "text": text(block.get("text"), f"{where}.text")}
        case "image":
            url = _url(mapping(block.get("source"), f"{where}.source"), f"{where}.source")
            return {"type": "image_url", "image_url": {"url": url}}
        case kind:
            raise unknown(where, "blocks", kind)


def _url(source: Json, where: str) -> str:
    match source.get("type"):
        case "url":
            return text(source.get("url"), f"{where}.url")
        case "base64":
            kind = text(source.get("media_type"), f"{where}.media_type")
            return f"data:{kind};base64,{text(source.get('data'), f'{where}.data')}"
        case kind:
            raise unknown(where, "sources", kind)


def _written(content: Json, where: str) -> str:
    try:
        return dumps(content).decode()
    except orjson.JSONEncodeError:
        raise wrong(where, "nested too deep") from None


# The way back.


def message_of(story: Story, name: str, model: str) -> Json:
    """`name`: the message's id."""
    reason, sequence = _why(story)
    return {
        **_opening(name, story.model or model),
        "content": [_content(block) for block in story.blocks],
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": _usage(story),
    }


def error_of(status: int, error: Json) -> Json:
    kind = ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error.get("message", ""))}}


class Events:
    """A story as Anthropic streams it."""

    def __init__(self, story: Story, name: str, model: str) -> None:
        self._story, self._name, self._model = story, name, model
        self._has_begun = False

    def tell(self, steps: Iterable[Step]) -> Iterator[bytes]:
        for step in steps:
            yield from self._begin()
            number = {"index": step.block.number}
            if step.does is Does.BEGINS:
                yield _event("content_block_start", content_block=_empty(step.block), **number)
            elif step.does is Does.GOES_ON:
                yield _event("content_block_delta", delta=_delta(step), **number)
            else:
                yield _event("content_block_stop", **number)

    def end(self) -> Iterator[bytes]:
        """The last ones; the story has ended, well or not."""
        story = self._story
        if story.error is not None:
            status = story.error.get("code")
            told = error_of(status if type(status) is int else 500, story.error)
            yield _event("error", error=told["error"])
            return
        yield from self._begin()
        reason, sequence = _why(story)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        yield _event("message_delta", delta=delta, usage=_usage(story))
        yield _event("message_stop")

    def _begin(self) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            opening = _opening(self._name, self._story.model or self._model)
            empty: Json = {"content": [], "stop_reason": None, "stop_sequence": None}
            yield _event("message_start", message={**opening, **empty, "usage": _usage(Story())})


def _opening(name: str, model: str) -> Json:
    return {"id": name, "type": "message", "role": "assistant", "model": model}


def _content(block: Block) -> Json:
    match block.kind:
        case Kind.THOUGHT:
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case Kind.TEXT:
            return {"type": "text", "text": block.text}
        case Kind.CALL:
            return {**_empty(block), "input": _arguments(block.text)}


def _empty(block: Block) -> Json:
    match block.kind:
        case Kind.THOUGHT:
            return {"type": "thinking", "thinking": "", "signature": ""}
        case Kind.TEXT:
            return {"type": "text", "text": ""}
        case Kind.CALL:
            name = block.id or f"toolu_{block.number}"
            return {"type": "tool_use", "id": name, "name": block.name, "input": {}}


def _delta(step: Step) -> Json:
    match step.block.kind:
        case Kind.THOUGHT:
            return {"type": "thinking_delta", "thinking": step.text}
        case Kind.TEXT:
            return {"type": "text_delta", "text": step.text}
        case Kind.CALL:
            return {"type": "input_json_delta", "partial_json": step.text}


def _arguments(written: str) -> Json:
    """A model may write what is no JSON: then its words are shown as they are."""
    try:
        read = loads(written.encode("utf-8", "surrogatepass") or b"{}")
    except orjson.JSONDecodeError:
        return {"INVALID_JSON": written}
    return read if isinstance(read, dict) else {"INVALID_JSON": written}


def _why(story: Story) -> tuple[str, str | None]:
    if story.finish == "stop" and isinstance(story.stop, str) and not story.has_calls:
        return "stop_sequence", story.stop
    if story.finish == "stop" and story.has_calls:
        return "tool_use", None
    return STOPS.get(story.finish or "", "end_turn"), None


def _usage(story: Story) -> Json:
    """Anthropic counts what a cache held apart."""
    usage = story.usage
    return {
        "input_tokens": max(0, usage.prompt - usage.cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.answer,
    }


def _event(kind: str, **fields: Any) -> bytes:
    content = dumps({"type": kind, **fields})
    return b"event: %b\ndata: %b\n\n" % (kind.encode("ascii"), content)
