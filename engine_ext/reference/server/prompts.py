"""From what a client wrote to the token ids the engine is given."""

import contextlib
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

MAX_PROMPTS = 1024

TokenIds = tuple[int, ...]


def read_prompts(value: Any) -> list[str | TokenIds]:
    """A string, a list of token ids, or a list of either.

    Raises EngineBadRequestError for all else.
    """

    def are_token_ids(item: Any) -> bool:
        return isinstance(item, list) and all(type(token) is int for token in item)

    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise EngineBadRequestError(
            "prompt must be a string, a list of token ids, or a list of them", "prompt"
        )
    if not value:
        raise EngineBadRequestError("prompt must not be empty", "prompt")
    if are_token_ids(value):
        return [tuple(value)]
    if len(value) > MAX_PROMPTS:
        raise EngineBadRequestError(
            f"prompt holds {len(value)} prompts, more than {MAX_PROMPTS}", "prompt"
        )
    if all(isinstance(prompt, str) for prompt in value):
        return value
    if all(are_token_ids(prompt) for prompt in value):
        return [tuple(prompt) for prompt in value]
    raise EngineBadRequestError("prompt mixes strings, token ids or other things", "prompt")


def encode(prompt: str | TokenIds, model: ServedModel, *, add_special_tokens: bool) -> TokenIds:
    """Raises EngineBadRequestError for an empty or too long prompt, or an unknown token id."""
    limit = model.max_model_len
    if isinstance(prompt, str):
        # A hopeless text is refused before tokenizing it costs anything.
        most = limit * model.tokenizer.longest_token
        if len(prompt) > most:
            raise EngineBadRequestError(
                f"This model's maximum context length is {limit} tokens. However, your prompt "
                f"contains {len(prompt)} characters (more than {most} characters, which is the "
                f"upper bound for {limit} input tokens). Please reduce the length of the input "
                "prompt.",
                "input_text",
            )
        prompt = tuple(model.tokenizer.encode(prompt, add_special_tokens=add_special_tokens))
    else:
        check_token_ids(prompt, model, "prompt")
    if not prompt:
        raise EngineBadRequestError("the prompt must not be empty", "prompt")
    if len(prompt) > limit:
        raise EngineBadRequestError(
            f"This model's maximum context length is {limit} tokens. However, your prompt contains "
            f"{len(prompt)} input tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt.",
            "input_tokens",
        )
    return prompt


def check_token_ids(ids: TokenIds | list[int], model: ServedModel, param: str) -> None:
    for token in (min(ids), max(ids)) if ids else ():
        if not 0 <= token < model.vocab_size:
            raise EngineBadRequestError(f"Token id {token} is out of vocabulary", param)


def render(conversation: ChatTemplateRequest, model: ServedModel) -> str:
    """The prompt's text. Raises EngineBadRequestError if the template or the messages say no."""
    if model.chat_template is None:
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
        return model.chat_template.render(
            messages,
            tools=conversation.tools,
            add_generation_prompt=conversation.adds_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            arguments=conversation.chat_template_kwargs,
        )
    except ValueError as error:
        raise EngineBadRequestError(str(error), "messages") from error


def answering_role(conversation: ChatTemplateRequest) -> str:
    last = conversation.messages[-1]
    if conversation.adds_generation_prompt or not isinstance(last, dict):
        return "assistant"
    return str(last.get("role"))


def _message(message: Any, place: int) -> dict[str, Any]:
    """As chat templates want a message: role, plain text, and tool calls with parsed arguments."""
    where = f"messages[{place}]"
    _require(isinstance(message, dict), f"{where} must be an object with role and content")
    _require(isinstance(message.get("role"), str), f"{where}.role must be a string")
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        parts = enumerate(content)
        content = "\n".join(_part(part, f"{where}.content[{index}]") for index, part in parts)
    # Agents send no content beside their tool calls, and templates add it to other strings.
    _require(
        content is None or isinstance(content, str),
        f"{where}.content must be a string or a list of text parts",
    )
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    kept["content"] = content or ""
    if calls:
        where = f"{where}.tool_calls"
        _require(isinstance(calls, list), f"{where} must be a list")
        kept["tool_calls"] = [_tool_call(one, f"{where}[{i}]") for i, one in enumerate(calls)]
    return kept


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    is_text = isinstance(part, dict) and part.get("type") == "text"
    _require(is_text, f"{where} must be a text part: this model reads nothing else")
    _require(isinstance(part.get("text"), str), f"{where}.text must be a string")
    return str(part["text"])


def _tool_call(call: Any, where: str) -> Any:
    """Templates want arguments as an object; clients send them as a string of JSON.

    Arguments that a model wrote badly once stay in the history: to refuse them would end the
    conversation. They become an empty object, as in vLLM.
    """
    function = call.get("function") if isinstance(call, dict) else None
    is_function = isinstance(function, dict) and call.get("type", "function") == "function"
    _require(is_function, f"{where}.function must be an object")
    assert isinstance(function, dict)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(orjson.JSONDecodeError):
            arguments = orjson.loads(arguments)
    arguments = arguments if isinstance(arguments, dict) else {}
    return {**call, "function": {**function, "arguments": arguments}}


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise EngineBadRequestError(message, "messages")


def tokenize(model: ServedModel, body: bytes) -> dict[str, Any]:
    """vLLM's `/tokenize`: of a `prompt`, or of `messages` as a chat would send them."""
    fields = json_object(body)
    request: TokenizeTextBody | TokenizeChatBody
    if "messages" in fields:
        request = parse(TokenizeChatBody, fields)
        text = render(request, model)
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
