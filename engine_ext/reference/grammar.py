"""Answers in a given form: JSON by a schema.

The package llguidance computes after each token which tokens may come next. The thread that reads a
request compiles its grammar, so that a wrong one is refused before anything is computed; the
engine's thread starts a copy of it for each answer. Nothing stops a thread that compiles a schema
without end, such as twenty patterns that must all match.
"""

import functools
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

MAX_GRAMMAR = 256 * 1024
"""Characters of one schema."""
NUM_KEPT = 32
"""Compiled grammars: clients send the same few again and again."""
JSON_OPTIONS: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,
}
"""One layout: small models write blanks forever if they may. And pydantic's unions: if one of
several fits, it is rarely two."""


class Grammar:
    """A compiled grammar and a position in it. Requests share the one that is at the beginning;
    each answer advances a copy of its own, which belongs to the engine's thread."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def start(self) -> "Grammar":
        return Grammar(self._matcher.deep_copy())

    def allowed(self, vocab_size: int) -> Tensor:
        """[vocab_size] of bool. Never without a token: a complete answer can end."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        flags = np.unpackbits(bits, count=vocab_size, bitorder="little")
        return torch.from_numpy(flags.view(np.bool_))

    def accept(self, token_id: int) -> str | None:
        """Advance by this token. Returns what is wrong if the grammar forbids it."""
        if self._matcher.consume_token(token_id):
            return None
        return _first_lines(self._matcher.get_error())


class GrammarCompiler:
    """For one model's vocabulary. May be used by several threads."""

    def __init__(
        self, tokenizer_json: str, *, vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self.compile = functools.lru_cache(NUM_KEPT)(self._compile)

    def _compile(self, schema: str) -> Grammar:
        """Raises ValueError, one line, for what is no JSON schema."""
        if not self._eos_token_ids:
            raise ValueError("this model has no token that ends an answer")
        if len(schema) > MAX_GRAMMAR:
            raise ValueError(f"it is longer than {MAX_GRAMMAR} characters")
        definition = LLMatcher.grammar_from_json_schema(schema, defaults=JSON_OPTIONS)
        matcher = LLMatcher(self._vocabulary, definition, log_level=0)
        # The first mask takes longest, and shows most of what is too complex.
        trial = matcher.deep_copy()
        trial.compute_bitmask()
        if error := trial.get_error():
            raise ValueError(_first_lines(error))
        return Grammar(matcher)

    @functools.cached_property
    def _vocabulary(self) -> Any:
        """Takes most of a second for 50,000 tokens, so it is made for the first grammar."""
        return LLTokenizer(
            self._tokenizer_json, n_vocab=self._vocab_size, eos_token=self._eos_token_ids
        )


def _first_lines(error: str) -> str:
    lines = error.strip().splitlines()
    return " ".join(" ".join(lines[:4]).split())[:300] or "the grammar is in an error state"
