"""What the endpoints know of the model behind them."""

from dataclasses import dataclass
from http import HTTPStatus

from engine_ext.reference.answer import StopRules
from engine_ext.reference.grammar import GrammarCompiler
from engine_ext.reference.server.requests import ApiError
from engine_ext.reference.tokenizer import ChatTemplate, Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    names: tuple[str, ...]
    """What clients may call it. The first is the one in answers."""
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
