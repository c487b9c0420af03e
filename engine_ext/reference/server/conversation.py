"""The messages of a chat request as chat templates want them: roles and plain text."""

import contextlib
from typing import Any

import orjson

from engine_ext.reference.chat_template import ChatTemplate
from engine_ext.reference.server.errors import EngineBadRequestError
from engine_ext.reference.server.requests import ChatTemplateRequest


def render(conversation: ChatTemplateRequest, template: ChatTemplate | None) -> str:
    """The prompt's text. Raises EngineBadRequestError where the template or the messages say no."""
    if template is None:
        raise EngineBadRequestError(
            "this model has no chat template: use /v1/completions", "messages"
        )
    if conversation.continue_final_message and conversation.add_generation_prompt:
        raise EngineBadRequestError(
            "continue_final_message and add_generation_prompt cannot both be true",
            "continue_final_message",
        )
    messages = [_message(message, place) for place, message in enumerate(conversation.messages)]
    try:
        return template.render(
            messages,
            tools=conversation.tools,
            add_generation_prompt=adds_generation_prompt(conversation),
            continue_final_message=conversation.continue_final_message,
            arguments=conversation.chat_template_kwargs,
        )
    except ValueError as error:
        raise EngineBadRequestError(str(error), "messages") from error


def adds_generation_prompt(conversation: ChatTemplateRequest) -> bool:
    if conversation.add_generation_prompt is not None:
        return conversation.add_generation_prompt
    return not conversation.continue_final_message


def answering_role(conversation: ChatTemplateRequest) -> str:
    last = conversation.messages[-1]
    if adds_generation_prompt(conversation) or not isinstance(last, dict):
        return "assistant"
    return str(last.get("role"))


def _message(message: Any, place: int) -> dict[str, Any]:
    where = f"messages[{place}]"
    if not isinstance(message, dict):
        raise EngineBadRequestError(f"{where} must be an object with role and content", "messages")
    if not isinstance(message.get("role"), str):
        raise EngineBadRequestError(f"{where}.role must be a string", "messages")
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    kept["content"] = _text(message.get("content"), f"{where}.content")
    calls = message.get("tool_calls")
    return {**kept, "tool_calls": _tool_calls(calls, f"{where}.tool_calls")} if calls else kept


def _text(content: Any, where: str) -> str:
    """Agents send no content beside their tool calls, and templates add it to other strings."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise EngineBadRequestError(f"{where} must be a string or a list of text parts", "messages")
    return "\n".join(_part(part, f"{where}[{place}]") for place, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise EngineBadRequestError(
            f"{where} must be a text part: this model reads nothing else", "messages"
        )
    if not isinstance(part.get("text"), str):
        raise EngineBadRequestError(f"{where}.text must be a string", "messages")
    return str(part["text"])


def _tool_calls(calls: Any, where: str) -> list[Any]:
    """Templates want arguments as an object; clients send them as a string of JSON."""
    if not isinstance(calls, list):
        raise EngineBadRequestError(f"{where} must be a list", "messages")
    return [_tool_call(call, f"{where}[{place}]") for place, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise EngineBadRequestError(f"{where}.function must be an object", "messages")
    arguments = _arguments(function.get("arguments"))
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments(given: Any) -> dict[str, Any]:
    """What a model wrote badly once is in the history for ever: to refuse it would end the
    conversation. It becomes an empty object, as in vLLM."""
    if isinstance(given, str):
        with contextlib.suppress(orjson.JSONDecodeError):
            given = orjson.loads(given)
    return given if isinstance(given, dict) else {}
