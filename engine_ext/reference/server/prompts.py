"""The model as the endpoints know it, and the way from what a client wrote to its token ids."""

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from engine_ext.reference.answer import StopRules
from engine_ext.reference.grammar import GrammarCompiler
from engine_ext.reference.server.requests import (
    ApiError,
    ChatTemplateRequest,
    EngineBadRequestError,
    TokenizeTextBody,
    json_object,
    parse,
)
from engine_ext.reference.tokenizer import ChatTemplate, Tokenizer

TokenIds = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    names: tuple[str, ...]
    """The model names that clients may use. Answers contain the first one."""
    vocab_size: int
    """Token ids below this are the model's; the tokenizer may know fewer."""
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    rules: StopRules
    grammars: GrammarCompiler
    created: int = 0
    """Unix time for /v1/models."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def max_model_len(self) -> int:
        return self.rules.max_model_len

    def check_name(self, name: str | None) -> None:
        """Raises ApiError. A request that names no model means this one."""
        if name and name not in self.names:
            known = ", ".join(self.names)
            message = f"The model `{name}` does not exist. Valid aliases: {known}."
            raise ApiError(HTTPStatus.NOT_FOUND, message, "model")


def are_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


def read_prompts(value: Any) -> list[str | TokenIds]:
    """A string, a list of token ids, or a list of either.

    Raises EngineBadRequestError for all else.
    """
    prompts = value if isinstance(value, list) and not are_token_ids(value) else [value]
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
    """The prompt's text. Raises EngineBadRequestError if the template says no."""
    if model.chat_template is None:
        raise EngineBadRequestError(
            "this model has no chat template: use /v1/completions", "messages"
        )
    try:
        return model.chat_template.render(
            [message.for_template() for message in conversation.messages],
            tools=conversation.tools,
            arguments=conversation.chat_template_kwargs,
        )
    except ValueError as error:
        raise EngineBadRequestError(str(error), "messages") from error


def tokenize(model: ServedModel, body: bytes) -> dict[str, Any]:
    """vLLM's `/tokenize`: of a `prompt`, or of `messages` as a chat would send them."""
    fields = json_object(body)
    request: TokenizeTextBody | ChatTemplateRequest
    if "messages" in fields:
        request = parse(ChatTemplateRequest, fields)
        text = render(request, model)
    else:
        request = parse(TokenizeTextBody, fields)
        text = request.prompt
    model.check_name(request.model)
    ids = model.tokenizer.encode(text, add_special_tokens=request.add_special_tokens)
    return {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids}
