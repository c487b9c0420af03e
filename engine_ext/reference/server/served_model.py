"""What the endpoints know of the model behind them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_ext.reference.answer import StopRules
from engine_ext.reference.grammar import GrammarCompiler
from engine_ext.reference.server.errors import EngineNotFoundError
from engine_ext.reference.tokenizer import ChatTemplate, Tokenizer, read_json_object


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request that says nothing gets: the model's `generation_config.json`, as in vLLM."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @classmethod
    def load(cls, directory: Path) -> "SamplingDefaults":
        """Raises ValueError for numbers that are none or out of range."""
        config = read_json_object(directory / "generation_config.json")
        defaults = cls(
            temperature=_number(config, "temperature", 1.0),
            top_p=_number(config, "top_p", 1.0),
            top_k=int(_number(config, "top_k", 0)),
        )
        if defaults.temperature < 0 or not 0 < defaults.top_p <= 1 or defaults.top_k < -1:
            raise ValueError(f"{directory}/generation_config.json is out of range: {defaults}")
        return defaults


def _number(config: Mapping[str, Any], name: str, default: float) -> float:
    value = config.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"generation_config.json: {name} must be a number, got {value!r}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    names: tuple[str, ...]
    """What clients may call it. The first is what answers say."""
    max_model_len: int
    """Tokens of prompt and answer together."""
    vocab_size: int
    """Token ids below this are the model's; the tokenizer may know fewer."""
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None = None
    eos_token_ids: frozenset[int] = frozenset()
    grammars: GrammarCompiler | None = None
    """None: no answers in a given form."""
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
        """Raises EngineNotFoundError. A request that names no model means this one."""
        if name and name not in self.names:
            known = ", ".join(self.names)
            raise EngineNotFoundError(
                f"The model `{name}` does not exist. Valid aliases: {known}.", "model"
            )
