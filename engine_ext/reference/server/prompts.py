"""From what a client wrote to the token ids the engine is given."""

from dataclasses import dataclass
from typing import Any

from engine_ext.reference.server.errors import EngineBadRequestError
from engine_ext.reference.server.lengths import check_characters, check_tokens
from engine_ext.reference.server.served_model import ServedModel

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
