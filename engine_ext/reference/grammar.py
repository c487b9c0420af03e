"""Answers in a given form: JSON by a schema.

The package llguidance computes after each token which tokens may come next. The thread that reads a
request compiles its grammar, so that a wrong one is refused before anything is computed; the
engine's thread starts a copy of it for each answer. llguidance compiles some schemas (twenty
patterns that must all match) forever, and a thread that is in it cannot be stopped. So each new
schema is compiled first in a process that can be killed.
"""

import functools
import subprocess
import sys
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor

MAX_GRAMMAR = 256 * 1024
"""Characters of one schema."""
NUM_KEPT = 32
"""Compiled grammars: clients send the same few again and again."""
COMPILE_TIMEOUT_S = 5.0
"""An ordinary schema takes some milliseconds."""
_COMPILE = """
import llguidance, resource, sys
seconds = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))  # if its parent is killed first
text, tokenizer = sys.stdin.buffer.read().decode(), llguidance.LLTokenizer("byte")
llguidance.LLMatcher(tokenizer, text, log_level=0).compute_bitmask()
"""
JSON_OPTIONS: dict[str, Any] = {
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
        library = _library()
        definition = library.LLMatcher.grammar_from_json_schema(schema, defaults=JSON_OPTIONS)
        check_compiles(definition)
        matcher = library.LLMatcher(self._vocabulary, definition, log_level=0)
        # The first mask takes longest, and shows most of what is too complex.
        trial = matcher.deep_copy()
        trial.compute_bitmask()
        if error := trial.get_error():
            raise ValueError(_first_lines(error))
        return Grammar(matcher)

    @functools.cached_property
    def _vocabulary(self) -> Any:
        """Takes most of a second for 50,000 tokens, so it is made for the first grammar."""
        return _library().LLTokenizer(
            self._tokenizer_json, n_vocab=self._vocab_size, eos_token=self._eos_token_ids
        )


def check_compiles(definition: str, timeout_s: float = COMPILE_TIMEOUT_S) -> None:
    """Raise ValueError for a grammar that is not compiled in time, or crashes the compiler.

    A grammar that is merely wrong passes: the compiler itself explains best what is wrong.
    """
    command = [sys.executable, "-P", "-c", _COMPILE, str(int(timeout_s) + 1)]
    quiet = subprocess.DEVNULL
    try:
        ended = subprocess.run(
            command, input=definition.encode(), timeout=timeout_s, stdout=quiet, stderr=quiet
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"it is too complex: not compiled in {timeout_s:g} s") from None
    if ended.returncode != 0:
        raise ValueError("it is too complex to be compiled")


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ValueError(
            "the package llguidance is not installed: pip install 'disagg-router[engine]'"
        ) from None
    return llguidance


def _first_lines(error: str) -> str:
    lines = error.strip().splitlines()
    return " ".join(" ".join(lines[:4]).split())[:300] or "the grammar is in an error state"
