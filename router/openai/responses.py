"""Translate OpenAI's Responses API to chat completions, and the answers back. Pure.

https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from router.common.exact_json import dumps
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

RESPONSES_PATH = "/v1/responses"
MAX_OUTPUT_TOKENS = "max_output_tokens"
MAX_COMPLETION_TOKENS = "max_completion_tokens"
INCLUDE_LOGPROBS = "message.output_text.logprobs"
# Fields that are translated or that have no meaning for an engine; all others are forwarded.
# fmt: off
TRANSLATED_FIELDS = frozenset((
    "background", "conversation", "include", "input", "instructions", "max_output_tokens",
    "max_tool_calls", "metadata", "previous_response_id", "prompt", "prompt_cache_key",
    "prompt_cache_retention", "reasoning", "safety_identifier", "service_tier", "store",
    "stream", "stream_options", "text", "tool_choice", "tools", "truncation",
))
# fmt: on
UNSUPPORTED_FIELDS = ("background", "conversation", "prompt", "max_tool_calls")
ECHOED_FIELDS = (
    "instructions", MAX_OUTPUT_TOKENS, "metadata", "previous_response_id", "temperature", "top_p",
    "user",
)  # fmt: skip
CHAT_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
INCOMPLETE_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}


class TranslatedResponseRequest(NamedTuple):
    """A chat request, and the messages that a following response starts with: all but the
    instructions."""

    chat: Json
    history: list[Json]


def chat_from_response(request: Json, before: list[Json]) -> TranslatedResponseRequest:
    """Return the chat completion request for a response request.

    `before` holds the messages up to and including the previous response. Raises BadRequestError.
    """
    chat = start_chat(request, TRANSLATED_FIELDS, UNSUPPORTED_FIELDS, _tool)
    if request.get("truncation") not in (None, "disabled"):
        raise field_error("truncation", "only disabled is supported")
    history = [*before, *_merged(_history(request.get("input")))]
    instructions = request.get("instructions")
    if instructions is None:
        chat["messages"] = history
    else:
        given = {"role": "system", "content": require_text(instructions, "instructions")}
        chat["messages"] = [given, *history]
    if (most := request.get(MAX_OUTPUT_TOKENS)) is not None:
        chat[MAX_COMPLETION_TOKENS] = most
    if request.get("tools") and request.get("tool_choice") is not None:
        chat["tool_choice"] = _choice(request["tool_choice"])
    _set_output(chat, request)
    return TranslatedResponseRequest(chat, history)


def _set_output(chat: Json, request: Json) -> None:
    if request.get("text") is not None:
        output = require_object(request["text"], "text").get("format")
        if output is not None:
            chat["response_format"] = _format(require_object(output, "text.format"))
    reasoning = request.get("reasoning")
    if isinstance(reasoning, dict) and reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    include = request.get("include")
    if isinstance(include, list) and INCLUDE_LOGPROBS in include:
        chat["logprobs"] = True


def _format(output: Json) -> Json:
    if output.get("type") != "json_schema":
        return output
    schema = {name: output[name] for name in ("name", "schema", "strict", "description")
              if output.get(name) is not None}  # fmt: skip
    return {"type": "json_schema", "json_schema": schema}


def _tool(tool: Json, where: str) -> Json:
    if tool.get("type") != "function":
        raise unsupported_type(where, "tools", tool.get("type"))
    require_text(tool.get("name"), f"{where}.name")
    function = {name: tool[name] for name in ("name", "description", "parameters", "strict")
                if tool.get(name) is not None}  # fmt: skip
    return {"type": "function", "function": function}


def _choice(choice: object) -> object:
    if isinstance(choice, str):
        return choice
    given = require_object(choice, "tool_choice")
    if given.get("type") != "function":
        raise unsupported_type("tool_choice", "choices", given.get("type"))
    name = require_text(given.get("name"), "tool_choice.name")
    return {"type": "function", "function": {"name": name}}


def _history(given: object) -> Iterator[Json]:
    if isinstance(given, str):
        yield {"role": "user", "content": given}
        return
    if not given:
        raise field_error("input", "is required: a require_text, or a list of require_objects")
    for number, item in enumerate(require_objects(given, "input")):
        yield from _messages_of(item, f"input[{number}]")


def _messages_of(item: Json, where: str) -> Iterator[Json]:
    match item.get("type", "message"):
        case "message":
            yield _message(item, where)
        case "function_call":
            name = require_text(item.get("name"), f"{where}.name")
            arguments = require_text(item.get("arguments"), f"{where}.arguments")
            call = {
                "id": require_text(item.get("call_id"), f"{where}.call_id"),
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            yield {"role": "assistant", "content": None, "tool_calls": [call]}
        case "function_call_output":
            name = require_text(item.get("call_id"), f"{where}.call_id")
            output = item.get("output")
            if not isinstance(output, str):
                output = _parts(output, f"{where}.output")
            yield {"role": "tool", "tool_call_id": name, "content": output}
        case "reasoning":
            pass  # chat templates leave reasoning out
        case kind:
            raise unsupported_type(where, "items", kind)


def _message(item: Json, where: str) -> Json:
    role = item.get("role")
    if not isinstance(role, str) or role not in CHAT_ROLES:
        raise field_error(f"{where}.role", f"must be one of {', '.join(CHAT_ROLES)}")
    content = item.get("content")
    if not isinstance(content, str):
        content = _parts(content, f"{where}.content")
    return {"role": CHAT_ROLES[role], "content": content}


def _parts(content: object, where: str) -> str | list[Json]:
    given = require_objects(content, where)
    return join_text_parts([_part(part, f"{where}[{number}]") for number, part in enumerate(given)])


def _part(part: Json, where: str) -> Json:
    match part.get("type"):
        case "input_text" | "output_text" | "text":
            return {"type": "text", "text": require_text(part.get("text"), f"{where}.text")}
        case "refusal":
            return {"type": "text", "text": require_text(part.get("refusal"), f"{where}.refusal")}
        case "input_image":
            url: Json = {"url": require_text(part.get("image_url"), f"{where}.image_url")}
            if part.get("detail") is not None:
                url["detail"] = part["detail"]
            return {"type": "image_url", "image_url": url}
        case "input_audio":
            audio = require_object(part.get("input_audio"), f"{where}.input_audio")
            return {"type": "input_audio", "input_audio": audio}
        case kind:
            raise unsupported_type(where, "parts", kind)


def _merged(messages: Iterable[Json]) -> Iterator[Json]:
    """Merge an assistant's tool calls into its message before them: they are separate items in a
    response, and one message in a chat."""
    last: Json | None = None
    for message in messages:
        calls = message.get("tool_calls")
        if last is not None and calls and last["role"] == "assistant":
            last["tool_calls"] = [*last.get("tool_calls", ()), *calls]
            continue
        if last is not None:
            yield last
        last = message
    if last is not None:
        yield last


# Answers.


def assistant_message(answer: AnswerBlocks) -> Json:
    """Return the answer as the assistant's message in the next request."""
    text = "".join(block.text for block in answer.blocks if block.kind is BlockKind.TEXT)
    calls = [
        {
            "id": _call_id(block),
            "type": "function",
            "function": {"name": block.name, "arguments": block.text},
        }
        for block in answer.blocks
        if block.kind is BlockKind.TOOL_CALL
    ]
    message: Json = {"role": "assistant", "content": text or None if calls else text}
    return {**message, "tool_calls": calls} if calls else message


class ResponseOutput:
    """Writes an answer as a response with the id `name`, whole or as a stream of events."""

    def __init__(self, answer: AnswerBlocks, request: Json, name: str, created: int) -> None:
        self._answer, self._request = answer, request
        self.name, self._created = name, created
        self._number = 0
        self._has_begun = False

    def whole(self, status: str | None = None) -> Json:
        """Return the response object. `status` is given only while the answer is in progress."""
        answer, request = self._answer, self._request
        reason = answer.finish_reason or ""
        if not answer.has_unknown_finish:
            reason = INCOMPLETE_REASONS.get(reason, "")
        is_over = status is None
        if status is None and answer.error is not None:
            status = "failed"
        elif status is None:
            status = "incomplete" if reason else "completed"
        error = None
        if answer.error is not None:
            error = {"code": "server_error", "message": str(answer.error.get("message", ""))}
        return {
            "id": self.name,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": {"reason": reason} if reason and is_over else None,
            "model": answer.model or request.get("model") or "",
            "output": [self._item(block) for block in answer.blocks] if is_over else [],
            **{name: request.get(name) for name in ECHOED_FIELDS},
            "parallel_tool_calls": request.get("parallel_tool_calls", True),
            "reasoning": request.get("reasoning") or {"effort": None, "summary": None},
            "store": request.get("store") is not False,
            "text": request.get("text") or {"format": {"type": "text"}},
            "tool_choice": request.get("tool_choice") or "auto",
            "tools": request.get("tools") or [],
            "truncation": "disabled",
            "usage": self._usage() if is_over else None,
        }

    def events(self, steps: Iterable[BlockStep]) -> Iterator[bytes]:
        for step in steps:
            yield from self._begin()
            match step.kind:
                case StepKind.BEGIN:
                    yield from self._open(step.block)
                case StepKind.EXTEND:
                    yield self._delta(step.block, step.text)
                case StepKind.END:
                    yield from self._close(step.block)

    def last_events(self) -> Iterator[bytes]:
        """Yield the last events, after the answer was closed."""
        yield from self._begin()
        error = self._answer.error
        if error is not None:
            fields = {"code": "server_error", "message": str(error.get("message", ""))}
            yield self._event("error", **fields, param=error.get("param"))
        response = self.whole()
        yield self._event(f"response.{response['status']}", response=response)

    def _begin(self) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            opening = self.whole("in_progress")
            yield self._event("response.created", response=opening)
            yield self._event("response.in_progress", response=opening)

    def _open(self, block: AnswerBlock) -> Iterator[bytes]:
        at = {"output_index": block.number}
        yield self._event("response.output_item.added", item=self._empty(block), **at)
        if block.kind is not BlockKind.TOOL_CALL:
            yield self._event(
                "response.content_part.added", part=_part_of(block, ""), **self._at(block)
            )

    def _delta(self, block: AnswerBlock, delta: str) -> bytes:
        match block.kind:
            case BlockKind.REASONING:
                return self._event("response.reasoning_text.delta", delta=delta, **self._at(block))
            case BlockKind.TEXT:
                kind = "response.output_text.delta"
                return self._event(kind, delta=delta, logprobs=[], **self._at(block))
            case BlockKind.TOOL_CALL:
                at = {"item_id": self._id(block), "output_index": block.number}
                return self._event("response.function_call_arguments.delta", delta=delta, **at)

    def _close(self, block: AnswerBlock) -> Iterator[bytes]:
        text, at = block.text, self._at(block)
        if block.kind is BlockKind.TOOL_CALL:
            del at["content_index"]
            kind = "response.function_call_arguments.done"
            yield self._event(kind, name=block.name, arguments=text, **at)
        else:
            if block.kind is BlockKind.TEXT:
                yield self._event("response.output_text.done", text=text, logprobs=[], **at)
            else:
                yield self._event("response.reasoning_text.done", text=text, **at)
            yield self._event("response.content_part.done", part=_part_of(block, text), **at)
        yield self._event(
            "response.output_item.done", item=self._item(block), output_index=block.number
        )

    def _item(self, block: AnswerBlock) -> Json:
        return {**self._empty(block), "status": "completed", **self._content(block)}

    def _empty(self, block: AnswerBlock) -> Json:
        given = {"id": self._id(block), "status": "in_progress"}
        match block.kind:
            case BlockKind.REASONING:
                return {"type": "reasoning", "summary": [], "content": [], **given}
            case BlockKind.TEXT:
                return {"type": "message", "role": "assistant", "content": [], **given}
            case BlockKind.TOOL_CALL:
                call = {"call_id": _call_id(block), "name": block.name, "arguments": ""}
                return {"type": "function_call", **call, **given}

    def _content(self, block: AnswerBlock) -> Json:
        if block.kind is BlockKind.TOOL_CALL:
            return {"arguments": block.text}
        part = _part_of(block, block.text)
        if block.kind is BlockKind.TEXT and self._answer.logprobs:
            part["logprobs"] = self._answer.logprobs
        return {"content": [part]}

    def _usage(self) -> Json:
        usage = self._answer.usage
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached},
            "output_tokens": usage.answer,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.prompt + usage.answer,
        }

    def _id(self, block: AnswerBlock) -> str:
        kinds = {BlockKind.REASONING: "rs", BlockKind.TEXT: "msg", BlockKind.TOOL_CALL: "fc"}
        return f"{kinds[block.kind]}_{self.name.removeprefix('resp_')}_{block.number}"

    def _at(self, block: AnswerBlock) -> Json:
        return {"item_id": self._id(block), "output_index": block.number, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        content = dumps({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode("ascii"), content)


def _part_of(block: AnswerBlock, text: str) -> Json:
    if block.kind is BlockKind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_id(block: AnswerBlock) -> str:
    return block.id or f"call_{block.number}"
