"""Translate OpenAI's Responses API to chat completions, and the answers back. Pure.

https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any, NamedTuple

from router.openai.answers import Json
from router.openai.context_errors import CONTEXT_EXCEEDED, with_context_code
from router.openai.dialects import (
    AnswerBlock,
    AnswerBlocks,
    BlockKind,
    BlockStep,
    DialectOutput,
    StepKind,
    arguments_text,
    chosen_tool,
    event,
    field_error,
    join_text_parts,
    of_type,
    require_object,
    require_objects,
    require_text,
    start_chat,
    text_part,
    tool_call,
    unsupported_type,
)
from router.openai.message_order import merge_messages
from router.openai.request_fields import MAX_COMPLETION_TOKENS, MAX_OUTPUT_TOKENS

RESPONSES_PATH = "/v1/responses"
INCLUDE_LOGPROBS = "message.output_text.logprobs"
# Fields that are translated or that have no meaning for an engine; all others are forwarded.
# fmt: off
TRANSLATED_FIELDS = frozenset((
    "background", "context_management", "conversation", "include", "input", "instructions",
    "max_output_tokens", "max_tool_calls", "moderation", "previous_response_id", "prompt",
    "prompt_cache_options", "prompt_cache_retention", "reasoning", "store",
    "stream", "stream_options", "text", "tool_choice", "tools", "truncation",
))
# fmt: on
UNSUPPORTED_FIELDS = ("background", "conversation", "prompt", "max_tool_calls")
ECHOED_FIELDS = (
    "instructions", MAX_OUTPUT_TOKENS, "metadata", "previous_response_id", "temperature", "top_p",
    "user",
)  # fmt: skip
# Records of what other tools did, of OpenAI or of the client. A history can be read without them.
RECORD_ITEMS = frozenset((
    "file_search_call", "ghost_snapshot", "image_generation_call", "mcp_list_tools",
    "web_search_call",
))  # fmt: skip
CHAT_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
# OpenAI's codes of errors, by the codes and types that engines and the router write. All other
# errors are `server_error`.
ERROR_CODES = {
    CONTEXT_EXCEEDED: CONTEXT_EXCEEDED,
    **dict.fromkeys(
        ("400", "413", "422", "BadRequestError", "invalid_request_error", "invalid_prompt"),
        "invalid_prompt",
    ),
    **dict.fromkeys(
        ("429", "RateLimitError", "rate_limit_error", "rate_limit_exceeded"), "rate_limit_exceeded"
    ),
}
INCOMPLETE_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}
# Of a block's id, and of the events for its text.
ID_PREFIXES = {BlockKind.REASONING: "rs", BlockKind.TEXT: "msg", BlockKind.TOOL_CALL: "fc"}
TEXT_EVENTS = {
    BlockKind.REASONING: "response.reasoning_text",
    BlockKind.TEXT: "response.output_text",
    BlockKind.TOOL_CALL: "response.function_call_arguments",
}


ToolNames = dict[str, tuple[str, str]]
"""By the name that the engine knows."""


class TranslatedResponseRequest(NamedTuple):
    """A chat request, and the messages that a following response starts with: all but the
    instructions. `names` are the namespaces and names of the tools that were flattened."""

    chat: Json
    history: list[Json]
    names: ToolNames


def chat_from_response(
    request: Json, before: list[Json], left_out: set[str]
) -> TranslatedResponseRequest:
    """Return the chat completion request for a response request. Raises BadRequestError.

    `before` holds the messages up to and including the previous response. `left_out` receives a
    phrase for each kind of thing that no engine can act on.
    """
    if added := _additional_tools(request):
        given = require_objects(request, "tools") if request.get("tools") else []
        request = {**request, "tools": [*(tool for tool, _ in given), *added]}
    names: ToolNames = {}
    if isinstance(request.get("tools"), list):
        request = {**request, "tools": list(_flat_tools(request, names))}
    chat = start_chat(request, TRANSLATED_FIELDS, UNSUPPORTED_FIELDS, _tool, left_out)
    # With "auto" OpenAI shortens prompts that are too long; engines refuse these instead.
    if request.get("truncation") not in (None, "auto", "disabled"):
        raise field_error("truncation", "must be auto or disabled")
    history = [*before, *_history(request, left_out)]
    instructions: list[Json] = []
    if request.get("instructions") is not None:
        instructions = [{"role": "system", "content": require_text(request, "instructions")}]
    chat["messages"] = merge_messages([*instructions, *history])
    if (most := request.get(MAX_OUTPUT_TOKENS)) is not None:
        chat[MAX_COMPLETION_TOKENS] = most
    if chat.get("tools") and request.get("tool_choice") is not None:
        _choose(chat, request, names)
    if request.get("text") is not None:
        text = require_object(request, "text")
        if text.get("format") is not None:
            chat["response_format"] = _format(require_object(text, "format", "text"))
    reasoning = request.get("reasoning")
    if isinstance(reasoning, dict) and reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    include = request.get("include")
    if isinstance(include, list) and INCLUDE_LOGPROBS in include:
        chat["logprobs"] = True
    if not chat.get("logprobs"):
        chat.pop("top_logprobs", None)  # engines refuse it alone
    return TranslatedResponseRequest(chat, history, names)


def _format(output: Json) -> Json:
    if output.get("type") != "json_schema":
        return output
    schema = _present(output, ("name", "schema", "strict", "description"))
    return {"type": "json_schema", "json_schema": schema}


def _additional_tools(request: Json) -> list[Json]:
    """Return the tools that items of the input add to those of the request."""
    if not isinstance(request.get("input"), list):
        return []
    return [
        tool
        for item, where in require_objects(request, "input")
        if item.get("type") == "additional_tools"
        for tool, _ in require_objects(item, "tools", where)
    ]


def _flat_tools(request: Json, names: ToolNames) -> Iterator[Json]:
    """Yield the tools, and those of a namespace as tools with its name, as vLLM does."""
    for tool, where in require_objects(request, "tools"):
        if tool.get("type") != "namespace":
            yield tool
            continue
        namespace = require_text(tool, "name", where)
        for inner, inner_where in require_objects(tool, "tools", where):
            name = require_text(inner, "name", inner_where)
            flat = _flat_name(namespace, name)
            if inner.get("type") == "function":
                names[flat] = namespace, name
            yield {**inner, "name": flat}


def _flat_name(namespace: str, name: str) -> str:
    return f"{namespace}__{name}"


def _tool(tool: Json, where: str) -> Json | None:
    if require_text(tool, "type", where) != "function":
        return None
    require_text(tool, "name", where)
    function = _present(tool, ("name", "description", "parameters", "strict"))
    return {"type": "function", "function": function}


def _present(given: Json, names: Iterable[str]) -> Json:
    return {name: given[name] for name in names if given.get(name) is not None}


def _choose(chat: Json, request: Json, names: ToolNames) -> None:
    if isinstance(request["tool_choice"], str):
        chat["tool_choice"] = request["tool_choice"]
        return
    choice = require_object(request, "tool_choice")
    match choice.get("type"):
        case "function":
            known = [tool["function"]["name"] for tool in chat["tools"]]
            chat["tool_choice"] = chosen_tool(_with_flat_name(choice, names, known))
        case "allowed_tools":
            _allow(chat, choice, names)
        case kind:
            raise unsupported_type("tool_choice", "choices", kind)


def _with_flat_name(tool: Json, names: ToolNames, known: Container[str]) -> Json:
    """Return a reference to a tool by a name that the engine knows. The tool's own name is enough
    if no other tool has it."""
    namespace, name = tool.get("namespace"), tool.get("name")
    if isinstance(namespace, str):
        return {**tool, "name": _flat_name(namespace, str(name))}
    found = [flat for flat, (_, local) in names.items() if local == name]
    return {**tool, "name": found[0]} if len(found) == 1 and name not in known else tool


def _allow(chat: Json, choice: Json, names: ToolNames) -> None:
    """Leave only the allowed tools in the chat: engines cannot be told to ignore some."""
    if choice.get("mode") not in ("auto", "required"):
        raise field_error("tool_choice.mode", "must be auto or required")
    known = {tool["function"]["name"]: tool for tool in chat["tools"]}
    allowed: dict[str, Json] = {}
    for tool, where in require_objects(choice, "tools", "tool_choice"):
        if tool.get("type") == "function":
            require_text(tool, "name", where)
            name = _with_flat_name(tool, names, known)["name"]
            if name not in known:
                raise field_error(where, "is not among the tools of the request")
            allowed[name] = known[name]
    if allowed:
        chat.update(tools=[*allowed.values()], tool_choice=choice["mode"])
    elif choice["mode"] == "required":
        raise field_error("tool_choice.tools", "none of them can be called")
    else:
        del chat["tools"]


def _history(request: Json, left_out: set[str]) -> Iterator[Json]:
    given = request.get("input")
    if isinstance(given, str):
        yield {"role": "user", "content": given}
        return
    if not given:
        raise field_error("input", "is required: a text, or a list of objects")
    for item, where in require_objects(request, "input"):
        if isinstance(kind := item.get("type"), str) and kind in RECORD_ITEMS:
            left_out.add(of_type("items", kind))
        else:
            yield from _messages_of(item, where)


def _messages_of(item: Json, where: str) -> Iterator[Json]:
    match item.get("type") or "message":
        case "message":
            role = item.get("role")
            if not isinstance(role, str) or role not in CHAT_ROLES:
                raise field_error(f"{where}.role", f"must be one of {', '.join(CHAT_ROLES)}")
            yield {"role": CHAT_ROLES[role], "content": _content(item, "content", where)}
        case "additional_tools":
            return  # they are among the tools of the chat
        case "reasoning":
            if text := _reasoning(item, where):
                yield {"role": "assistant", "content": "", "reasoning": text}
        case "function_call":
            name = require_text(item, "name", where)
            if isinstance(namespace := item.get("namespace"), str):
                name = _flat_name(namespace, name)
            yield _call(item, name, require_text(item, "arguments", where) or "{}", where)
        case "custom_tool_call":
            arguments = arguments_text({"input": require_text(item, "input", where)}, where)
            yield _call(item, require_text(item, "name", where), arguments, where)
        case "local_shell_call":
            arguments = arguments_text(require_object(item, "action", where), where)
            yield _call(item, "local_shell", arguments, where)
        case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output":
            content = _content(item, "output", where)
            images = []
            if isinstance(content, list):  # chats accept only texts in the messages of tools
                images = [part for part in content if part["type"] != "text"]
                content = "\n".join(part["text"] for part in content if part["type"] == "text")
            yield {"role": "tool", "tool_call_id": _call_id_of(item, where), "content": content}
            if images:
                yield {"role": "user", "content": images}
        case kind:
            raise unsupported_type(where, "items", kind)


def _call(item: Json, name: str, arguments: str, where: str) -> Json:
    call = tool_call(_call_id_of(item, where), name, arguments)
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _call_id_of(item: Json, where: str) -> str:
    """Return the id of a call; calls of the local shell may have no other one than the item's."""
    is_missing = item.get("call_id") is None and isinstance(item.get("id"), str)
    return require_text(item, "id" if is_missing else "call_id", where)


def _reasoning(item: Json, where: str) -> str:
    """Return a trace's text, or its summary if the text is not there. Encrypted ones have none."""
    for name in ("content", "summary"):
        if item.get(name):
            parts = require_objects(item, name, where)
            return "\n".join(require_text(part, "text", place) for part, place in parts)
    return ""


def _content(item: Json, name: str, where: str) -> str | list[Json]:
    """Return the content of a message: a text, or parts."""
    if isinstance(text := item.get(name), str):
        return text
    return join_text_parts([_part(*placed) for placed in require_objects(item, name, where)])


def _part(part: Json, where: str) -> Json:
    match part.get("type"):
        case "input_text" | "output_text" | "text":
            return text_part(part, "text", where)
        case "refusal":
            return text_part(part, "refusal", where)
        case "input_image":
            url: Json = {"url": require_text(part, "image_url", where)}
            return {"type": "image_url", "image_url": url | _present(part, ("detail",))}
        case "input_audio":
            audio = require_object(part, "input_audio", where)
            return {"type": "input_audio", "input_audio": audio}
        case kind:
            raise unsupported_type(where, "parts", kind)


# Answers.


def assistant_message(answer: AnswerBlocks) -> Json:
    """Return the answer as the assistant's message in the next request."""
    text, reasoning = (
        "".join(block.text for block in answer.blocks if block.kind is kind)
        for kind in (BlockKind.TEXT, BlockKind.REASONING)
    )
    calls = [
        tool_call(block.id, block.name, block.text)
        for block in answer.blocks
        if block.kind is BlockKind.TOOL_CALL
    ]
    message: Json = {"role": "assistant", "content": text or None if calls else text}
    if reasoning:
        message["reasoning"] = reasoning
    return {**message, "tool_calls": calls} if calls else message


class ResponseOutput(DialectOutput):
    """Writes an answer as a response with the id `name`."""

    def __init__(
        self,
        answer: AnswerBlocks,
        request: Json,
        name: str,
        created: int,
        tool_names: ToolNames | None = None,
    ) -> None:
        super().__init__(answer)
        self._request, self._name, self._created = request, name, created
        self._tool_names = tool_names or {}
        self._number = 0

    def restart(self) -> None:
        super().restart()
        self._number = 0

    def mark_unstored(self) -> None:
        """Write `store: false` from now on, because the router could not store the response."""
        self._request = {**self._request, "store": False}

    def whole(self) -> Json:
        answer, usage = self._answer, self._answer.usage
        reason = self._incomplete_reason
        status = "failed" if answer.error is not None else "incomplete" if reason else "completed"
        return {
            **self._in_progress(),
            "status": status,
            "error": None if answer.error is None else _error(answer.error),
            "incomplete_details": {"reason": reason} if reason else None,
            "output": [self._item(block) for block in answer.blocks],
            "usage": {
                "input_tokens": usage.prompt,
                "input_tokens_details": {
                    "cached_tokens": usage.cached,
                    "cache_write_tokens": usage.written,
                },
                "output_tokens": usage.answer,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning},
                "total_tokens": usage.prompt + usage.answer,
            },
        }

    @property
    def _incomplete_reason(self) -> str:
        reason = self._answer.finish_reason or ""
        if self._answer.has_unknown_finish:
            return reason
        return INCOMPLETE_REASONS.get(reason, "")

    def _in_progress(self) -> Json:
        """Return the response object before its first block."""
        request = self._request
        return {
            "id": self._name,
            "object": "response",
            "created_at": self._created,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self._answer.model or request.get("model") or "",
            "output": [],
            **{name: request.get(name) for name in ECHOED_FIELDS},
            "parallel_tool_calls": request.get("parallel_tool_calls") is not False,
            "reasoning": request.get("reasoning") or {"effort": None, "summary": None},
            "store": request.get("store") is not False,
            "text": request.get("text") or {"format": {"type": "text"}},
            "tool_choice": request.get("tool_choice") or "auto",
            "tools": request.get("tools") or [],
            "truncation": request.get("truncation") or "disabled",
            "usage": None,
        }

    def _first_events(self) -> Iterator[bytes]:
        for what in ("created", "in_progress"):
            yield self._event(f"response.{what}", response=self._in_progress())

    def _events_of(self, step: BlockStep) -> Iterator[bytes]:
        block = step.block
        at: Json = {"item_id": self._id(block), "output_index": block.number}
        # A tool call's item has no content parts.
        has_parts = block.kind is not BlockKind.TOOL_CALL
        if has_parts:
            at["content_index"] = 0
        is_text = block.kind is BlockKind.TEXT
        kind = TEXT_EVENTS[block.kind]
        match step.kind:
            case StepKind.BEGIN:
                item = self._empty(block)
                yield self._event(
                    "response.output_item.added", item=item, output_index=block.number
                )
                if has_parts:
                    part = _part_of(block, "")
                    yield self._event("response.content_part.added", part=part, **at)
            case StepKind.EXTEND:
                more: Json = {"logprobs": _without_bytes(step.logprobs)} if is_text else {}
                yield self._event(f"{kind}.delta", delta=step.text, **more, **at)
            case StepKind.END:
                text = block.text
                if has_parts:
                    part = _part_of(block, text)
                    more = {"logprobs": _without_bytes(part["logprobs"])} if is_text else {}
                    yield self._event(f"{kind}.done", text=text, **more, **at)
                    yield self._event("response.content_part.done", part=part, **at)
                else:
                    name = self._tool_name(block)["name"]
                    yield self._event(f"{kind}.done", name=name, arguments=text, **at)
                item = self._item(block)
                yield self._event("response.output_item.done", item=item, output_index=block.number)

    def heartbeat(self) -> Iterator[bytes]:
        if self._has_begun:
            yield self._event("response.in_progress", response=self._in_progress())
        yield from self._begin()

    def last_events(self) -> Iterator[bytes]:
        yield from self._begin()
        error = self._answer.error
        if error is not None:
            yield self._event("error", **_error(error), param=error.get("param"))
        response = self.whole()
        yield self._event(f"response.{response['status']}", response=response)

    def _item(self, block: AnswerBlock) -> Json:
        """Return the output item of a block that has ended."""
        answer = self._answer
        is_cut = answer.error is not None or bool(self._incomplete_reason)
        status = "incomplete" if is_cut and block is answer.blocks[-1] else "completed"
        item = {**self._empty(block), "status": status}
        if block.kind is BlockKind.TOOL_CALL:
            return {**item, "arguments": block.text}
        return {**item, "content": [_part_of(block, block.text)]}

    def _empty(self, block: AnswerBlock) -> Json:
        given = {"id": self._id(block), "status": "in_progress"}
        match block.kind:
            case BlockKind.REASONING:
                return {"type": "reasoning", "summary": [], "content": [], **given}
            case BlockKind.TEXT:
                return {"type": "message", "role": "assistant", "content": [], **given}
            case BlockKind.TOOL_CALL:
                call = {"call_id": block.id, **self._tool_name(block), "arguments": ""}
                return {"type": "function_call", **call, **given}

    def _tool_name(self, block: AnswerBlock) -> Json:
        """Return the fields of an item that name the tool of a call."""
        if block.name not in self._tool_names:
            return {"name": block.name}
        namespace, name = self._tool_names[block.name]
        return {"namespace": namespace, "name": name}

    def _id(self, block: AnswerBlock) -> str:
        return f"{ID_PREFIXES[block.kind]}_{self._name.removeprefix('resp_')}_{block.number}"

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return event(kind, sequence_number=self._number - 1, **fields)


def _error(error: Json) -> Json:
    """Return OpenAI's error for one that an engine or the router wrote into a stream."""
    error = with_context_code(error)
    names = (str(error.get("code")), str(error.get("type")))
    code = next((ERROR_CODES[name] for name in names if name in ERROR_CODES), "server_error")
    return {"code": code, "message": str(error.get("message", ""))}


def _without_bytes(logprobs: Iterable[object]) -> list[object]:
    """Return log-probabilities as the events of deltas have them: tokens without their bytes."""
    found: list[object] = []
    for entry in logprobs:
        if isinstance(entry, dict):
            entry = {name: value for name, value in entry.items() if name != "bytes"}
            if isinstance(entry.get("top_logprobs"), list):
                entry["top_logprobs"] = _without_bytes(entry["top_logprobs"])
        found.append(entry)
    return found


def _part_of(block: AnswerBlock, text: str) -> Json:
    if block.kind is BlockKind.REASONING:
        return {"type": "reasoning_text", "text": text}
    logprobs = [entry for part in block.logprobs.values() for entry in part] if text else []
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def response_of_item(id: str) -> str:
    """Return the id of the response that an item with this id may belong to."""
    return "resp_" + id.partition("_")[2].rpartition("_")[0]
