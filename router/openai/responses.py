"""OpenAI's Responses: a request as a chat, and a chat's answer as a response. Pure.

https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from router.common.exact_json import dumps
from router.openai.answer_blocks import Block, Does, Kind, Step, Story
from router.openai.answers import Json
from router.openai.field_checks import items, mapping, plain, text, unknown, wrong

PATH = "/v1/responses"
MAX_OUTPUT = "max_output_tokens"
MAX_COMPLETION = "max_completion_tokens"
LOGPROBS = "message.output_text.logprobs"
# Read here, or without a meaning for an engine; anything else goes to it as it is.
CONSUMED = frozenset(
    (
        "background",
        "conversation",
        "include",
        "input",
        "instructions",
        "max_output_tokens",
        "max_tool_calls",
        "metadata",
        "previous_response_id",
        "prompt",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning",
        "safety_identifier",
        "service_tier",
        "store",
        "stream",
        "stream_options",
        "text",
        "tool_choice",
        "tools",
        "truncation",
    )
)
UNSUPPORTED = ("background", "conversation", "prompt", "max_tool_calls")
ECHOED = ("instructions", MAX_OUTPUT, "metadata", "previous_response_id", "temperature", "top_p",
          "user")  # fmt: skip
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


class Asked(NamedTuple):
    """A chat, and of its messages those that the next turn begins with: without instructions."""

    chat: Json
    history: list[Json]


def chat_of(asked: Json, before: list[Json]) -> Asked:
    """`before`: what was said up to the previous response. Raises BadRequestError."""
    for name in UNSUPPORTED:
        if asked.get(name):
            raise wrong(name, "is not supported")
    if asked.get("truncation") not in (None, "disabled"):
        raise wrong("truncation", "only disabled is supported")
    chat: Json = {name: asked[name] for name in asked if name not in CONSUMED}
    history = [*before, *_merged(_history(asked.get("input")))]
    instructions = asked.get("instructions")
    if instructions is None:
        chat["messages"] = history
    else:
        given = {"role": "system", "content": text(instructions, "instructions")}
        chat["messages"] = [given, *history]
    if (most := asked.get(MAX_OUTPUT)) is not None:
        chat[MAX_COMPLETION] = most
    if asked.get("stream"):
        chat["stream"], chat["stream_options"] = asked["stream"], {"include_usage": True}
    if asked.get("tools"):
        tools = items(asked["tools"], "tools")
        chat["tools"] = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools)]
        if asked.get("tool_choice") is not None:
            chat["tool_choice"] = _choice(asked["tool_choice"])
    _set_output(chat, asked)
    return Asked(chat, history)


def _set_output(chat: Json, asked: Json) -> None:
    if asked.get("text") is not None:
        output = mapping(asked["text"], "text").get("format")
        if output is not None:
            chat["response_format"] = _format(mapping(output, "text.format"))
    reasoning = asked.get("reasoning")
    if isinstance(reasoning, dict) and reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    include = asked.get("include")
    if isinstance(include, list) and LOGPROBS in include:
        chat["logprobs"] = True


def _format(output: Json) -> Json:
    if output.get("type") != "json_schema":
        return output
    schema = {name: output[name] for name in ("name", "schema", "strict", "description")
              if output.get(name) is not None}  # fmt: skip
    return {"type": "json_schema", "json_schema": schema}


def _tool(tool: Json, where: str) -> Json:
    if tool.get("type") != "function":
        raise unknown(where, "tools", tool.get("type"))
    text(tool.get("name"), f"{where}.name")
    function = {name: tool[name] for name in ("name", "description", "parameters", "strict")
                if tool.get(name) is not None}  # fmt: skip
    return {"type": "function", "function": function}


def _choice(choice: object) -> object:
    if isinstance(choice, str):
        return choice
    given = mapping(choice, "tool_choice")
    if given.get("type") != "function":
        raise unknown("tool_choice", "choices", given.get("type"))
    name = text(given.get("name"), "tool_choice.name")
    return {"type": "function", "function": {"name": name}}


def _history(given: object) -> Iterator[Json]:
    if isinstance(given, str):
        yield {"role": "user", "content": given}
        return
    if not given:
        raise wrong("input", "is required: a text, or a list of items")
    for number, item in enumerate(items(given, "input")):
        yield from _said(item, f"input[{number}]")


def _said(item: Json, where: str) -> Iterator[Json]:
    match item.get("type", "message"):
        case "message":
            yield _message(item, where)
        case "function_call":
            name = text(item.get("name"), f"{where}.name")
            arguments = text(item.get("arguments"), f"{where}.arguments")
            call = {
                "id": text(item.get("call_id"), f"{where}.call_id"),
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            yield {"role": "assistant", "content": None, "tool_calls": [call]}
        case "function_call_output":
            name = text(item.get("call_id"), f"{where}.call_id")
            output = item.get("output")
            if not isinstance(output, str):
                output = _parts(output, f"{where}.output")
            yield {"role": "tool", "tool_call_id": name, "content": output}
        case "reasoning":
            pass  # templates leave it out
        case kind:
            raise unknown(where, "items", kind)


def _message(item: Json, where: str) -> Json:
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise wrong(f"{where}.role", f"must be one of {', '.join(ROLES)}")
    content = item.get("content")
    if not isinstance(content, str):
        content = _parts(content, f"{where}.content")
    return {"role": ROLES[role], "content": content}


def _parts(content: object, where: str) -> str | list[Json]:
    given = items(content, where)
    return plain([_part(part, f"{where}[{number}]") for number, part in enumerate(given)])


def _part(part: Json, where: str) -> Json:
    match part.get("type"):
        case "input_text" | "output_text" | "text":
            return {"type": "text", "text": text(part.get("text"), f"{where}.text")}
        case "refusal":
            return {"type": "text", "text": text(part.get("refusal"), f"{where}.refusal")}
        case "input_image":
            url: Json = {"url": text(part.get("image_url"), f"{where}.image_url")}
            if part.get("detail") is not None:
                url["detail"] = part["detail"]
            return {"type": "image_url", "image_url": url}
        case "input_audio":
            audio = mapping(part.get("input_audio"), f"{where}.input_audio")
            return {"type": "input_audio", "input_audio": audio}
        case kind:
            raise unknown(where, "parts", kind)


def _merged(messages: Iterable[Json]) -> Iterator[Json]:
    """What the assistant said and called in one turn are items of their own here, and one message
    in a chat."""
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


# The way back.


def said_in(story: Story) -> Json:
    """The answer as a chat's next turn has it."""
    words = "".join(block.text for block in story.blocks if block.kind is Kind.TEXT)
    calls = [
        {
            "id": _call_id(block),
            "type": "function",
            "function": {"name": block.name, "arguments": block.text},
        }
        for block in story.blocks
        if block.kind is Kind.CALL
    ]
    message: Json = {"role": "assistant", "content": words or None if calls else words}
    return {**message, "tool_calls": calls} if calls else message


class Telling:
    """Makes a response of a story, whole or as it goes. `name`: the response's id."""

    def __init__(self, story: Story, asked: Json, name: str, created: int) -> None:
        self._story, self._asked = story, asked
        self.name, self._created = name, created
        self._number = 0
        self._has_begun = False

    def response(self, status: str | None = None) -> Json:
        """`status`: of one that is under way."""
        story, asked = self._story, self._asked
        reason = story.finish if story.is_odd else INCOMPLETE.get(story.finish or "")
        if status is None:
            status = (
                "failed" if story.error is not None else "incomplete" if reason else "completed"
            )
        error = None
        if story.error is not None:
            error = {"code": "server_error", "message": str(story.error.get("message", ""))}
        is_over = status != "in_progress"
        return {
            "id": self.name,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": {"reason": reason} if reason and is_over else None,
            "model": story.model or asked.get("model") or "",
            "output": [self._item(block, "completed") for block in story.blocks] if is_over else [],
            **{name: asked.get(name) for name in ECHOED},
            "parallel_tool_calls": asked.get("parallel_tool_calls", True),
            "reasoning": asked.get("reasoning") or {"effort": None, "summary": None},
            "store": asked.get("store") is not False,
            "text": asked.get("text") or {"format": {"type": "text"}},
            "tool_choice": asked.get("tool_choice") or "auto",
            "tools": asked.get("tools") or [],
            "truncation": "disabled",
            "usage": self._usage() if is_over else None,
        }

    def tell(self, steps: Iterable[Step]) -> Iterator[bytes]:
        for step in steps:
            yield from self._begin()
            match step.does:
                case Does.BEGINS:
                    yield from self._open(step.block)
                case Does.GOES_ON:
                    yield self._delta(step.block, step.text)
                case Does.ENDS:
                    yield from self._close(step.block)

    def end(self) -> Iterator[bytes]:
        """The last ones; the story has ended, well or not."""
        yield from self._begin()
        error = self._story.error
        if error is not None:
            told = {"code": "server_error", "message": str(error.get("message", ""))}
            yield self._event("error", **told, param=error.get("param"))
        response = self.response()
        yield self._event(f"response.{response['status']}", response=response)

    def _begin(self) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            opening = self.response("in_progress")
            yield self._event("response.created", response=opening)
            yield self._event("response.in_progress", response=opening)

    def _open(self, block: Block) -> Iterator[bytes]:
        at = {"output_index": block.number}
        yield self._event("response.output_item.added", item=self._empty(block), **at)
        if block.kind is not Kind.CALL:
            yield self._event(
                "response.content_part.added", part=_part_of(block, ""), **self._at(block)
            )

    def _delta(self, block: Block, delta: str) -> bytes:
        match block.kind:
            case Kind.THOUGHT:
                return self._event("response.reasoning_text.delta", delta=delta, **self._at(block))
            case Kind.TEXT:
                kind = "response.output_text.delta"
                return self._event(kind, delta=delta, logprobs=[], **self._at(block))
            case Kind.CALL:
                at = {"item_id": self._id(block), "output_index": block.number}
                return self._event("response.function_call_arguments.delta", delta=delta, **at)

    def _close(self, block: Block) -> Iterator[bytes]:
        words, at = block.text, self._at(block)
        item = self._item(block, "completed")
        if block.kind is Kind.CALL:
            del at["content_index"]
            kind = "response.function_call_arguments.done"
            yield self._event(kind, name=block.name, arguments=words, **at)
        else:
            if block.kind is Kind.TEXT:
                yield self._event("response.output_text.done", text=words, logprobs=[], **at)
            else:
                yield self._event("response.reasoning_text.done", text=words, **at)
            yield self._event("response.content_part.done", part=_part_of(block, words), **at)
        yield self._event("response.output_item.done", item=item, output_index=block.number)

    def _item(self, block: Block, status: str) -> Json:
        return {**self._empty(block), "status": status, **self._content(block)}

    def _empty(self, block: Block) -> Json:
        given = {"id": self._id(block), "status": "in_progress"}
        match block.kind:
            case Kind.THOUGHT:
                return {"type": "reasoning", "summary": [], "content": [], **given}
            case Kind.TEXT:
                return {"type": "message", "role": "assistant", "content": [], **given}
            case Kind.CALL:
                call = {"call_id": _call_id(block), "name": block.name, "arguments": ""}
                return {"type": "function_call", **call, **given}

    def _content(self, block: Block) -> Json:
        if block.kind is Kind.CALL:
            return {"arguments": block.text}
        part = _part_of(block, block.text)
        if block.kind is Kind.TEXT and self._story.logprobs:
            part["logprobs"] = self._story.logprobs
        return {"content": [part]}

    def _usage(self) -> Json:
        usage = self._story.usage
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached},
            "output_tokens": usage.answer,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.prompt + usage.answer,
        }

    def _id(self, block: Block) -> str:
        kinds = {Kind.THOUGHT: "rs", Kind.TEXT: "msg", Kind.CALL: "fc"}
        return f"{kinds[block.kind]}_{self.name.removeprefix('resp_')}_{block.number}"

    def _at(self, block: Block) -> Json:
        return {"item_id": self._id(block), "output_index": block.number, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        content = dumps({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode("ascii"), content)


def _part_of(block: Block, words: str) -> Json:
    if block.kind is Kind.THOUGHT:
        return {"type": "reasoning_text", "text": words}
    return {"type": "output_text", "text": words, "annotations": [], "logprobs": []}


def _call_id(block: Block) -> str:
    return block.id or f"call_{block.number}"
