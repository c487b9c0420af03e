"""Translate Anthropic's Messages API to chat completions, and the answers back. Pure.

https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime

import orjson

from router.common.exact_json import dumps, loads
from router.openai.answers import Json
from router.openai.changing_lines import without_changing_lines
from router.openai.context_errors import as_anthropic_states
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
    read_flag,
    require_object,
    require_objects,
    require_text,
    start_chat,
    text_part,
    tool_call,
    unsupported_type,
)
from router.openai.message_order import merge_messages
from router.openai.request_fields import MAX_TOKENS, field_problem, read_fields

MESSAGES_PATH, COUNT_TOKENS_PATH = "/v1/messages", "/v1/messages/count_tokens"
# Fields that are translated, or left out because only Anthropic can act on them; all others but
# hints are forwarded.
# fmt: off
TRANSLATED_FIELDS = frozenset((
    "cache_control", "container", "context_management", "mcp_servers", "messages",
    "output_config", "output_format", "stop_sequences", "stream", "system", "thinking",
    "tool_choice", "tools",
))
# fmt: on
# They give the model tools or files that the router cannot.
UNSUPPORTED_FIELDS = ("container", "mcp_servers")
# vLLM takes ctx and msg for the user, too.
ROLES = {
    "user": "user", "assistant": "assistant", "system": "system", "ctx": "user", "msg": "user",
}  # fmt: skip
TOOL_CHANGES = ("tool_addition", "tool_removal")
# Images and documents in tool results that an engine can read.
READABLE_SOURCES = (
    ("image", "base64"), ("image", "url"), ("document", "text"), ("document", "content"),
)  # fmt: skip
# The fields of a chat on which the number of its tokens depends.
COUNTED_FIELDS = ("model", "messages", "tools", "chat_template_kwargs")
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
    "repetition": "end_turn",
}
# The type of a block's delta, and the field with the text.
DELTAS = {
    BlockKind.REASONING: ("thinking_delta", "thinking"),
    BlockKind.TEXT: ("text_delta", "text"),
    BlockKind.TOOL_CALL: ("input_json_delta", "partial_json"),
}


def chat_from_messages(body: Json, left_out: set[str], changing_lines: Sequence[str]) -> Json:
    """Return the chat completion request for a message request. Raises BadRequestError.

    What only Anthropic can act on is left out; `left_out` receives a phrase for each kind of it.
    So are the first lines of system texts that match a pattern of `changing_lines`.
    """
    if "max_tokens" not in body:
        raise field_error("max_tokens", "Field required")
    return _translate_request(body, MessageTranslator(left_out, changing_lines))


def count_request_from_messages(
    body: Json, left_out: set[str], changing_lines: Sequence[str]
) -> Json:
    """Return the /tokenize request that counts a message's tokens. Raises BadRequestError."""
    chat = _translate_request(body, MessageTranslator(left_out, changing_lines))
    return {name: chat[name] for name in COUNTED_FIELDS if name in chat}


def _translate_request(body: Json, translator: MessageTranslator) -> Json:
    body = _with_tool_changes(body)
    chat = start_chat(body, TRANSLATED_FIELDS, UNSUPPORTED_FIELDS, _tool, translator.left_out)
    system = translator.system_message(body, "system") if body.get("system") is not None else ()
    chat["messages"] = merge_messages([*system, *translator.messages_of(body)])
    if body.get("stop_sequences") is not None:
        chat["stop"] = body["stop_sequences"]
    user = body.get("metadata")
    if isinstance(user, dict) and isinstance(user.get("user_id"), str):
        chat["user"] = user["user_id"]
    config = require_object(body, "output_config") if body.get("output_config") is not None else {}
    if isinstance(config.get("effort"), str):
        chat["reasoning_effort"] = config["effort"]
    if body.get("thinking") is not None:
        _think(chat, require_object(body, "thinking"))
    for holder, name, where in (
        (body, "output_format", ""),  # the name of the field in Anthropic's beta
        (config, "format", "output_config"),
    ):
        if holder.get(name) is not None:
            chat["response_format"] = _response_format(require_object(holder, name, where), name)
    if body.get("tool_choice") is not None and body.get("tools"):
        _choose(chat, require_object(body, "tool_choice"))
    return chat


def _think(chat: Json, thinking: Json) -> None:
    """Translate the configuration of thinking as vLLM does."""
    match thinking.get("type"):
        case "enabled":
            budget = thinking.get("budget_tokens")
            if why := field_problem(budget, int):
                raise field_error("thinking.budget_tokens", why)
            budget = read_fields({"n": budget})["n"]
            most = chat.get(MAX_TOKENS)
            if isinstance(most, int | float) and budget >= most:
                raise field_error("thinking.budget_tokens", "must be less than max_tokens")
            chat["thinking_token_budget"] = budget
        case "disabled":
            chat["reasoning_effort"] = "none"
        case "adaptive":
            pass  # the model chooses
        case kind:
            raise unsupported_type("thinking", "configurations", kind)


def _with_tool_changes(body: Json) -> Json:
    """Return the body with the tools that are in effect at the end of its messages.

    System messages may add tools (by their definition, or one that was removed by its name) and
    remove them. Chat templates know one list of tools.
    """
    messages = body.get("messages")
    changes = [
        block
        for message in (messages if isinstance(messages, list) else ())
        if isinstance(message, dict) and message.get("role") == "system"
        for block in (message["content"] if isinstance(message.get("content"), list) else ())
        if isinstance(block, dict) and block.get("type") in TOOL_CHANGES
    ]
    if not changes:
        return body
    given = require_objects(body, "tools") if body.get("tools") else []
    tools = {require_text(tool, "name", where): tool for tool, where in given}
    removed: set[str] = set()
    for change in changes:
        tool = require_object(change, "tool", "messages")
        if tool.get("type") == "tool_definition":
            tool = require_object(tool, "definition", "messages")
            tools[require_text(tool, "name", "messages")] = tool
        name = require_text(tool, "name", "messages")
        if change["type"] == "tool_removal":
            removed.add(name)
        else:
            removed.discard(name)
    return {**body, "tools": [tool for name, tool in tools.items() if name not in removed]}


def _response_format(output: Json, where: str) -> Json:
    if output.get("type") != "json_schema":
        raise unsupported_type(where, "formats", output.get("type"))
    schema = {"name": "output", "schema": output.get("schema")}
    return {"type": "json_schema", "json_schema": schema}


def _choose(chat: Json, choice: Json) -> None:
    kind = choice.get("type")
    if kind == "tool":
        chat["tool_choice"] = chosen_tool(choice)
        if all(tool["function"]["name"] != choice["name"] for tool in chat["tools"]):
            raise field_error("tool_choice.name", "is not the name of a tool that can be called")
    elif isinstance(kind, str) and kind in TOOL_CHOICES:
        chat["tool_choice"] = TOOL_CHOICES[kind]
    else:
        raise unsupported_type("tool_choice", "choices", kind)
    if read_flag(choice, "disable_parallel_tool_use", "tool_choice"):
        chat["parallel_tool_calls"] = False


def _tool(tool: Json, where: str) -> Json | None:
    """Translate a tool; None for one that Anthropic runs or defines."""
    if tool.get("type") not in (None, "custom") and not isinstance(tool.get("input_schema"), dict):
        return None
    function: Json = {"name": require_text(tool, "name", where)}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    function["parameters"] = require_object(tool, "input_schema", where)
    if (strict := read_flag(tool, "strict", where)) is not None:
        function["strict"] = strict
    return {"type": "function", "function": function}


class MessageTranslator:
    """Translates the system prompt and the history. Blocks that cannot be translated are left out
    if something of the message is left, and they are no file of the user that the answer would be
    about."""

    def __init__(self, left_out: set[str], changing_lines: Sequence[str]) -> None:
        self.left_out, self._changing_lines = left_out, changing_lines

    def system_message(self, holder: Json, name: str, where: str = "") -> Iterator[Json]:
        """Yield the system message in a field, unless its text is empty."""
        given = holder.get(name)
        texts = [given] if isinstance(given, str) else self._texts(holder, name, where)
        kept = [without_changing_lines(text, self._changing_lines) for text in texts]
        if any(kept):
            yield {"role": "system", "content": "\n".join(filter(None, kept))}

    def _texts(self, holder: Json, name: str, where: str = "") -> Iterator[str]:
        """Return the texts of a list of blocks."""
        for block, block_where in require_objects(holder, name, where):
            if block.get("type", "text") == "text":
                yield require_text(block, "text", block_where)
            elif block.get("type") not in TOOL_CHANGES:
                self.left_out.add(of_type("blocks", block.get("type")))

    def messages_of(self, body: Json) -> Iterator[Json]:
        if not body.get("messages"):
            raise field_error("messages", "at least one message is required")
        placed = require_objects(body, "messages")
        for message, where in placed:
            given, content = message.get("role"), message.get("content")
            if not isinstance(given, str) or given not in ROLES:
                raise field_error(f"{where}.role", "must be user, assistant or system")
            role = ROLES[given]
            if role == "system":
                yield from self.system_message(message, "content", where)
                continue
            if isinstance(content, str):
                yield {"role": role, "content": content}
                continue
            blocks = require_objects(message, "content", where)
            if role == "assistant":
                yield self._assistant_message(blocks)
                continue
            if not blocks:
                raise field_error(f"{where}.content", "at least one block is required")
            translated = list(self._user_messages(blocks))
            if not translated and message is placed[-1][0]:
                raise unsupported_type(blocks[0][1], "blocks", blocks[0][0].get("type"))
            yield from translated

    def _assistant_message(self, blocks: list[tuple[Json, str]]) -> Json:
        """Translate blocks of the assistant. Whether the model sees its reasoning is for the chat
        template to decide."""
        texts: list[str] = []
        traces: list[str] = []
        calls: list[Json] = []
        for block, where in blocks:
            match block.get("type"):
                case "text":
                    texts.append(require_text(block, "text", where))
                case "tool_use":
                    calls.append(_call(block, where))
                case "thinking" if isinstance(block.get("thinking"), str):
                    traces.append(block["thinking"])
                case "thinking" | "redacted_thinking":
                    pass  # without a text that an engine can read
                case "compaction" if isinstance(block.get("content"), str):
                    texts.append(block["content"])
                case kind:
                    self.left_out.add(of_type("blocks", kind))
        content = None if calls and not texts else "".join(texts)
        message: Json = {"role": "assistant", "content": content}
        if trace := "\n\n".join(filter(None, traces)):
            message["reasoning"] = trace
        return {**message, "tool_calls": calls} if calls else message

    def _user_messages(self, blocks: list[tuple[Json, str]]) -> Iterator[Json]:
        """Translate blocks of the user. Tool results come first, as messages of their own."""
        parts: list[Json] = []
        for block, where in blocks:
            if block.get("type") == "tool_result":
                result, images = self._result(block, where)
                yield result
                parts += images
            elif (part := self._part(block, where)) is not None:
                parts.append(part)
        if parts:
            yield {"role": "user", "content": join_text_parts(parts)}

    def _result(self, block: Json, where: str) -> tuple[Json, list[Json]]:
        """Return a tool's message, and its images, which chats accept only in user messages."""
        content = block.get("content")
        given = {"role": "tool", "tool_call_id": require_text(block, "tool_use_id", where)}
        if content is None or isinstance(content, str):
            return {**given, "content": content or ""}, []
        parts = [self._result_part(*placed) for placed in require_objects(block, "content", where)]
        texts = [part["text"] for part in parts if part["type"] == "text"]
        images = [part for part in parts if part["type"] != "text"]
        return {**given, "content": "\n".join(texts)}, images

    def _result_part(self, block: Json, where: str) -> Json:
        """Translate a part of a tool's result. The user cannot change what a tool returns, so the
        model is told what it cannot see."""
        kind, source = block.get("type"), block.get("source")
        if kind == "tool_reference":
            name = block.get("tool_name") or block.get("name")
            return {"type": "text", "text": f"The tool {name} is available."}
        of = source.get("type") if isinstance(source, dict) else None
        if kind in ("text", "search_result") or (kind, of) in READABLE_SOURCES:
            part = self._part(block, where)
            if part is not None:
                return part
        self.left_out.add(of_type("parts of tool results", kind))
        return {"type": "text", "text": f"[{of_type('content', kind)} cannot be shown]"}

    def _part(self, block: Json, where: str) -> Json | None:
        match block.get("type"):
            case "text":
                return text_part(block, "text", where)
            case "image":
                url = _url(require_object(block, "source", where), f"{where}.source")
                return {"type": "image_url", "image_url": {"url": url}}
            case "document" if isinstance(block.get("source"), dict):
                return self._document(block, where)
            case "search_result":
                return _titled(block, ("title", "source"), self._texts(block, "content", where))
            case "document" | "container_upload" as kind:
                raise unsupported_type(where, "blocks", kind)
            case kind:
                self.left_out.add(of_type("blocks", kind))
                return None

    def _document(self, block: Json, where: str) -> Json:
        source, where = block["source"], f"{where}.source"
        match source.get("type"):
            case "text":
                texts = [require_text(source, "data", where)]
            case "content" if isinstance(source.get("content"), str):
                texts = [source["content"]]
            case "content":
                texts = list(self._texts(source, "content", where))
            case kind:
                raise unsupported_type(where, "documents", kind)
        return _titled(block, ("title", "context"), texts)


def _titled(block: Json, names: tuple[str, ...], texts: Iterable[str]) -> Json:
    """Return one text of a block's headings and texts."""
    headings = [block[name] for name in names if isinstance(block.get(name), str)]
    return {"type": "text", "text": "\n".join([*headings, *texts])}


def _call(block: Json, where: str) -> Json:
    arguments = require_object(block, "input", where) if block.get("input") is not None else {}
    name = require_text(block, "name", where)
    written = arguments_text(arguments, where)
    return tool_call(require_text(block, "id", where), name, written)


def _url(source: Json, where: str) -> str:
    match source.get("type"):
        case "url":
            return require_text(source, "url", where)
        case "base64":
            kind = require_text(source, "media_type", where)
            return f"data:{kind};base64,{require_text(source, 'data', where)}"
        case kind:
            raise unsupported_type(where, "sources", kind)


# Answers.


def anthropic_error(status: int, error: Json) -> Json:
    """Return Anthropic's error body for OpenAI's error object."""
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    message = str(error.get("message", ""))
    if status == 400:
        message = as_anthropic_states(message)
    return {"type": "error", "error": {"type": kind, "message": message}}


def anthropic_model(model: Json) -> Json:
    """Return a model of OpenAI's list with the fields of Anthropic's."""
    created = model.get("created")
    moment = datetime.fromtimestamp(created if type(created) is int else 0, UTC)
    name = model["id"]
    return {"type": "model", "display_name": name, "created_at": moment.isoformat(), **model}


def error_body_for(path: str, status: int, body: bytes) -> bytes:
    """Return the body of an OpenAI error as a client of the API at this path expects it."""
    if path != MESSAGES_PATH and not path.startswith(f"{MESSAGES_PATH}/"):
        return body
    return dumps(anthropic_error(status, loads(body)["error"]))


class MessageOutput(DialectOutput):
    """Writes an answer as a message with the id `name`."""

    def __init__(self, answer: AnswerBlocks, name: str, model: str) -> None:
        super().__init__(answer)
        self._name, self._model = name, model

    def whole(self) -> Json:
        blocks = [_block(block, block.text) for block in self._answer.blocks]
        return self._message(blocks, _stop(self._answer), _usage(self._answer))

    def _first_events(self) -> Iterator[bytes]:
        unstopped = {"stop_reason": None, "stop_sequence": None}
        yield event("message_start", message=self._message([], unstopped, _usage(AnswerBlocks())))

    def _events_of(self, step: BlockStep) -> Iterator[bytes]:
        block = step.block
        if step.kind is StepKind.BEGIN:
            yield event("content_block_start", content_block=_block(block, ""), index=block.number)
        elif step.kind is StepKind.EXTEND:
            kind, name = DELTAS[block.kind]
            delta = {"type": kind, name: step.text}
            yield event("content_block_delta", delta=delta, index=block.number)
        else:
            yield event("content_block_stop", index=block.number)

    def heartbeat(self) -> Iterator[bytes]:
        yield event("ping")

    def last_events(self) -> Iterator[bytes]:
        answer = self._answer
        if answer.error is not None:
            status = answer.error.get("code")
            error = anthropic_error(status if type(status) is int else 500, answer.error)
            yield event("error", error=error["error"])
            return
        yield from self._begin()
        yield event("message_delta", delta=_stop(answer), usage=_usage(answer))
        yield event("message_stop")

    def _message(self, content: list[Json], stop: Json, usage: Json) -> Json:
        model = self._answer.model or self._model
        opening = {"id": self._name, "type": "message", "role": "assistant", "model": model}
        return {**opening, "content": content, **stop, "usage": usage}


def _block(block: AnswerBlock, text: str) -> Json:
    match block.kind:
        case BlockKind.REASONING:
            return {"type": "thinking", "thinking": text, "signature": ""}
        case BlockKind.TEXT:
            return {"type": "text", "text": text}
        case BlockKind.TOOL_CALL:
            named = {"id": block.id, "name": block.name}
            return {"type": "tool_use", **named, "input": _arguments(text)}


def _arguments(written: str) -> Json:
    """Parse a tool call's arguments. Text that is not a JSON object is returned under a key."""
    try:
        read = loads(written.encode("utf-8", "surrogatepass") or b"{}")
    except orjson.JSONDecodeError:
        return {"INVALID_JSON": written}
    return read if isinstance(read, dict) else {"INVALID_JSON": written}


def _stop(answer: AnswerBlocks) -> Json:
    reason, sequence = STOP_REASONS.get(answer.finish_reason or "", "end_turn"), None
    if answer.finish_reason == "stop" and answer.has_tool_calls:
        reason = "tool_use"
    elif answer.finish_reason == "stop" and isinstance(answer.stop_reason, str):
        reason, sequence = "stop_sequence", answer.stop_reason
    return {"stop_reason": reason, "stop_sequence": sequence}


def _usage(answer: AnswerBlocks) -> Json:
    """Return the usage; Anthropic's input tokens are those that were neither read from a cache nor
    written to one."""
    usage = answer.usage
    return {
        "input_tokens": max(0, usage.prompt - usage.cached - usage.written),
        "cache_creation_input_tokens": usage.written,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.answer,
    }
