"""Answers in a given form: JSON by a schema, a regular expression, one of some choices.

The package llguidance says after each token which may come next. A grammar is compiled by the
thread that reads the request, so that a wrong one is refused before anything is computed; the
engine's thread starts a copy of it for each answer.
"""

import functools
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine_ext.reference.grammar_trial import try_grammar

MAX_GRAMMAR = 256 * 1024
"""Characters of one grammar."""
_KEPT = 32
"""Compiled grammars: clients send the same few again and again."""


class Grammar:
    """Compiled, and never advanced itself."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def start(self) -> "Constraint":
        return Constraint(self._matcher.deep_copy())


class Constraint:
    """A grammar and how far one answer has come in it. Belongs to the engine's thread."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self, vocab_size: int) -> Tensor:
        """[vocab_size] of bool. Never without a token: a complete answer can end."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        flags = np.unpackbits(bits, count=vocab_size, bitorder="little")
        return torch.from_numpy(flags.view(np.bool_))

    def accept(self, token_id: int) -> str | None:
        """The answer goes on with this token. Returns what is wrong where it cannot."""
        if self._matcher.consume_token(token_id):
            return None
        return _first_line(self._matcher.get_error())


class GrammarCompiler:
    """For one model's vocabulary. May be used by several threads."""

    def __init__(
        self, tokenizer_json: str, *, vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self.compile = functools.lru_cache(_KEPT)(self._compile)

    def _compile(self, kind: str, text: str) -> Grammar:
        """`kind`: json_schema, regex, choice (a JSON list of strings) or grammar.

        Raises ValueError, one line, for what is no such thing.
        """
        if not self._eos_token_ids:
            raise ValueError("this model has no token that ends an answer")
        if len(text) > MAX_GRAMMAR:
            raise ValueError(f"it is longer than {MAX_GRAMMAR} characters")
        library = _library()
        definition = _definition(kind, text)
        try_grammar(definition)
        matcher = library.LLMatcher(self._vocabulary, definition, log_level=0)
        # The first mask takes longest, and tells most of what is too complex.
        trial = matcher.deep_copy()
        trial.compute_bitmask()
        if error := trial.get_error():
            raise ValueError(_first_line(error))
        return Grammar(matcher)

    @functools.cached_property
    def _vocabulary(self) -> Any:
        """Most of a second for 50,000 tokens: not before somebody asks."""
        return _library().LLTokenizer(
            self._tokenizer_json, n_vocab=self._vocab_size, eos_token=self._eos_token_ids
        )


def _definition(kind: str, text: str) -> Any:
    if kind == "json_schema":
        # One layout: small models write blanks for ever where they may.
        options: dict[str, Any] = {
            "whitespace_flexible": False,
            "item_separator": ", ",
            "key_separator": ": ",
        }
        # pydantic's unions: where one of several fits, it is rarely two.
        options["coerce_one_of"] = True
        return _library().LLMatcher.grammar_from_json_schema(text, defaults=options)
    return _library().grammar_from(kind, text)


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ValueError(
            "the package llguidance is not installed: pip install 'disagg-router[engine]'"
        ) from None
    return llguidance


def _first_line(error: str) -> str:
    lines = error.strip().splitlines()
    return " ".join(" ".join(lines[:4]).split())[:300] or "the grammar is in an error state"
