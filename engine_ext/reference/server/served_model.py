"""What the endpoints know of the model behind them."""

from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path

import pydantic
from pydantic import Field

from engine_ext.reference.answer import StopRules
from engine_ext.reference.grammar import GrammarCompiler
from engine_ext.reference.server.requests import ApiError
from engine_ext.reference.tokenizer import ChatTemplate, Tokenizer, read_json_object


class SamplingDefaults(pydantic.BaseModel, frozen=True):
    """For a request that sets nothing: the model's `generation_config.json`, as in vLLM."""

    temperature: float = Field(default=1.0, ge=0, strict=True, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1, strict=True)
    top_k: int = Field(default=0, ge=-1)

    @classmethod
    def load(cls, directory: Path) -> "SamplingDefaults":
        """Raises ValueError for values that are no numbers or out of range."""
        config = read_json_object(directory / "generation_config.json")
        given = {name: config[name] for name in cls.model_fields if config.get(name) is not None}
        try:
            return cls(**given)
        except pydantic.ValidationError as error:
            name, reason = error.errors()[0]["loc"][0], error.errors()[0]["msg"]
            raise ValueError(
                f"{directory}/generation_config.json is out of range: {name}: {reason}"
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    names: tuple[str, ...]
    """What clients may call it. The first is the one in answers."""
    max_model_len: int
    """Tokens of prompt and answer together."""
    vocab_size: int
    """Token ids below this are the model's; the tokenizer may know fewer."""
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None = None
    eos_token_ids: frozenset[int] = frozenset()
    grammars: GrammarCompiler
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    created: int = 0
    """Unix time for /v1/models."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def rules(self) -> StopRules:
        return StopRules(self.eos_token_ids, self.max_model_len)

    def check_name(self, name: str | None) -> None:
        """Raises ApiError. A request that names no model means this one."""
        if name and name not in self.names:
            known = ", ".join(self.names)
            message = f"The model `{name}` does not exist. Valid aliases: {known}."
            raise ApiError(HTTPStatus.NOT_FOUND, message, "model")
