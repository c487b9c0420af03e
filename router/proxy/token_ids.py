"""The token ids in engines' answers (`return_token_ids`), which the router takes out if the client
has not asked for them.

A chat has the prompt's ids in its answer, or in the first chunk of its stream, and a completion in
its choice. Each choice, or each chunk's, has the ids of its own tokens.
"""

from __future__ import annotations

import re

import orjson

from router.openai.answers import Json, choices_of, ids_in

RETURN_TOKEN_IDS = "return_token_ids"
ID_FIELDS = frozenset(("prompt_token_ids", "token_ids"))
MARK = b'token_ids"'
# A field with the comma before it, or the first field of an object with the comma behind it. It is
# never found in the text of a model, since quotes inside JSON strings are escaped.
_FIELD = rb'"(prompt_)?token_ids"\s*:\s*(null|\[[\d,\s]*\])'
FIELDS = re.compile(rb",\s*" + _FIELD + rb"|" + _FIELD + rb"\s*,?")


class StreamedIds:
    """Collects the ids in a stream of whole events. `is_asked_for`: the client gets them, too."""

    __slots__ = ("_is_asked_for", "_output", "_prompt")

    def __init__(self, is_asked_for: bool) -> None:
        self._is_asked_for = is_asked_for
        self._prompt: list[int] = []
        self._output: list[int] = []

    def passing(self, block: bytes) -> bytes:
        return block if block.find(MARK) < 0 else FIELDS.sub(self._take, block)

    def cut(self, num_tokens: int) -> None:
        """Forget the ids behind the first ones of the answer: another engine samples them again."""
        del self._output[num_tokens:]

    @property
    def all(self) -> list[int] | None:
        """The ids of prompt and answer, None if the engine has not reported both."""
        return [*self._prompt, *self._output] if self._prompt and self._output else None

    def _take(self, field: re.Match[bytes]) -> bytes:
        is_prompt, written = field[1] or field[3], field[2] or field[4]
        ids = orjson.loads(written) or []
        if not is_prompt:
            self._output += ids
        elif not self._prompt:
            self._prompt = ids
        return field[0] if self._is_asked_for else b""


def prompt_ids_in(content: Json) -> list[int] | None:
    """Return the prompt's ids in an answer, None if it has none."""
    ids = ids_in(content.get("prompt_token_ids"))
    if ids is not None:
        return ids
    choices = choices_of(content)
    return ids_in(choices[0].get("prompt_token_ids")) if choices else None


def take_token_ids(content: Json, is_asked_for: bool) -> list[int] | None:
    """Return the ids of the prompt and the answer in a whole answer, None if any are missing.

    Takes them out of the answer, unless its client `is_asked_for` them.
    """
    choices = choices_of(content)
    prompt = prompt_ids_in(content)
    output = ids_in(choices[0].get("token_ids")) if len(choices) == 1 else None
    if not is_asked_for:
        for fields in (content, *choices):
            fields.update(dict.fromkeys(ID_FIELDS & fields.keys()))  # null, as without the request
    return None if prompt is None or output is None else [*prompt, *output]
