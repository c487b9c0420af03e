"""From what a client wrote to the token ids the engine is given."""

import contextlib
from typing import Any

import orjson

from engine_ext.reference.server.requests import (
    ChatTemplateRequest,
    EngineBadRequestError,
    TokenizeChatBody,
    TokenizeTextBody,
    json_object,
    parse,
)
from engine_ext.reference.server.served_model import ServedModel

MAX_PROMPTS = 1024

TokenIds = tuple[int, ...]


def are_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


def read_prompts(value: Any) -> list[str | TokenIds]:
    """A string, a list of token ids, or a list of either.

    Raises EngineBadRequestError for all else.
    """
    prompts = value if isinstance(value, list) and not are_token_ids(value) else [value]
    if len(prompts) > MAX_PROMPTS:
        raise EngineBadRequestError(
            f"prompt holds {len(prompts)} prompts, more than {MAX_PROMPTS}", "prompt"
        )
    if all(isinstance(prompt, str) for prompt in prompts):
        return prompts
    if all(are_token_ids(prompt) for prompt in prompts):
        return [tuple(prompt) for prompt in prompts]
    raise EngineBadRequestError(
        "prompt must be a string, a list of token ids, or a list of one of them", "prompt"
    )


def encode(prompt: str | TokenIds, model: ServedModel, *, add_special_tokens: bool) -> TokenIds:
    """Raises EngineBadRequestError for an empty or too long prompt, or an unknown token id."""
    limit = model.max_model_len
    if isinstance(prompt, str):
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
    messages = [_message(message, place) for place, message in enumerate(conversation.messages)]
    try:
        return model.chat_template.render(
            messages, tools=conversation.tools, arguments=conversation.chat_template_kwargs
        )
    except ValueError as error:
        raise EngineBadRequestError(str(error), "messages") from error


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
    return {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids}
