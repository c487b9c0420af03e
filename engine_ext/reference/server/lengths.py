"""How long a prompt may be and how much room that leaves for an answer: vLLM's rules and words.

Too many tokens of answer for what is left of the context are cut to what is left; more than the
whole context are refused.
"""

from engine_ext.reference.server.errors import EngineBadRequestError
from engine_ext.reference.server.served_model import ServedModel


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
