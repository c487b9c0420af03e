"""The messages of a chat request as chat templates want them: roles and plain text."""

import contextlib
from dataclasses import dataclass
from typing import Any

import orjson

from engine_ext.reference.server.connection import json_object
from engine_ext.reference.server.errors import EngineBadRequestError
from engine_ext.reference.server.requests import (
    ChatTemplateRequest,
    DetokenizeBody,
    TokenizeChatBody,
    TokenizeTextBody,
    parse,
)
from engine_ext.reference.server.served_model import ServedModel
from engine_ext.reference.tokenizer import ChatTemplate


def check_asked(asked: int | None, model: ServedModel, param: str) -> None:
    """Before anything is tokenized. Raises EngineBadRequestError."""
    limit = model.max_model_len
    if asked is not None and asked > limit:
        raise EngineBadRequestError(
            f"{param}={asked} cannot be greater than max_model_len={limit}. "
            "Please request fewer output tokens.",
            param,
        )


def check_characters(prompt: str, model: ServedModel) -> None:
    """Turns a hopeless text away before tokenizing it costs anything.

    Raises EngineBadRequestError.
    """
    limit = model.max_model_len
    most = limit * model.tokenizer.longest_token
    if len(prompt) > most:
        raise EngineBadRequestError(
            f"This model's maximum context length is {limit} tokens. However, your prompt contains "
            f"{len(prompt)} characters (more than {most} characters, which is the upper bound for "
            f"{limit} input tokens). Please reduce the length of the input prompt.",
            "input_text",
        )


def check_tokens(count: int, model: ServedModel) -> None:
    """Raises EngineBadRequestError for a prompt that is longer than the context."""
    limit = model.max_model_len
    if count > limit:
        raise EngineBadRequestError(
            f"This model's maximum context length is {limit} tokens. However, your prompt contains "
            f"{count} input tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt.",
            "input_tokens",
        )


def room(prompt: int, asked: int | None, model: ServedModel) -> int:
    """Tokens that an answer to a prompt of `prompt` tokens may have.

    Raises EngineBadRequestError.
    """
    left = model.max_model_len - prompt
    found = left if asked is None else min(asked, left)
    if found < 1:
        raise EngineBadRequestError(f"max_tokens must be at least 1, got {found}.", "max_tokens")
    return found


MAX_PROMPTS = 1024

TokenIds = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    token_ids: TokenIds
    echo: str = ""
    """What an answer repeats in front of itself."""


def read_prompts(value: Any, param: str = "prompt") -> list[str | TokenIds]:
    """A string, a list of token ids, or a list of either.

    Raises EngineBadRequestError for all else.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise EngineBadRequestError(
            f"{param} must be a string, a list of token ids, or a list of them", param
        )
    if not value:
        raise EngineBadRequestError(f"{param} must not be empty", param)
    if _are_token_ids(value):
        return [tuple(value)]
    if len(value) > MAX_PROMPTS:
        raise EngineBadRequestError(
            f"{param} holds {len(value)} prompts, more than {MAX_PROMPTS}", param
        )
    if all(isinstance(prompt, str) for prompt in value):
        return value
    if all(isinstance(prompt, list) and _are_token_ids(prompt) for prompt in value):
        return [tuple(prompt) for prompt in value]
    raise EngineBadRequestError(f"{param} mixes strings, token ids or other things", param)


def _are_token_ids(value: list[Any]) -> bool:
    return all(type(token) is int for token in value)


def encode(prompt: str | TokenIds, model: ServedModel, *, add_special_tokens: bool) -> TokenIds:
    """Raises EngineBadRequestError for an empty or too long prompt, or an unknown token id."""
    if isinstance(prompt, str):
        check_characters(prompt, model)
        prompt = tuple(model.tokenizer.encode(prompt, add_special_tokens=add_special_tokens))
    else:
        check_token_ids(prompt, model, "prompt")
    if not prompt:
        raise EngineBadRequestError("the prompt must not be empty", "prompt")
    check_tokens(len(prompt), model)
    return prompt


def check_token_ids(ids: TokenIds | list[int], model: ServedModel, param: str) -> None:
    if not ids:
        return
    lowest, highest = min(ids), max(ids)
    wrong = lowest if lowest < 0 else highest
    if not 0 <= wrong < model.vocab_size:
        raise EngineBadRequestError(f"Token id {wrong} is out of vocabulary", param)


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


def tokenize(model: ServedModel, body: bytes) -> dict[str, Any]:
    """Of a `prompt`, or of `messages` as a chat would send them to the model."""
    fields = json_object(body)
    request: TokenizeTextBody | TokenizeChatBody
    if "messages" in fields:
        request = parse(TokenizeChatBody, fields)
        text = render(request, model.chat_template)
    else:
        request = parse(TokenizeTextBody, fields)
        text = request.prompt
    model.check_name(request.model)
    ids = model.tokenizer.encode(text, add_special_tokens=request.add_special_tokens)
    names = [model.tokenizer.token_string(token) for token in ids]
    return {
        "count": len(ids),
        "max_model_len": model.max_model_len,
        "tokens": ids,
        "token_strs": names if request.return_token_strs else None,
    }


def detokenize(model: ServedModel, body: bytes) -> dict[str, Any]:
    request = parse(DetokenizeBody, json_object(body))
    model.check_name(request.model)
    check_token_ids(request.tokens, model, "tokens")
    return {"prompt": model.tokenizer.decode(request.tokens)}
