"""The tokenizer of a Hugging Face model directory: text to token ids and back."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class Tokenizer:
    """`tokenizer.json`, and from `tokenizer_config.json` the named special tokens.

    `backend` is shared with the engine's detokenizer; it is safe to use from several threads.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: dict[str, Any] | None = None) -> None:
        self.backend = backend
        self.config = config or {}
        self.special_tokens = _special_tokens(self.config)
        self._byte_of = byte_alphabet() if _is_byte_level(backend) else {}
        self._added = frozenset(backend.get_added_tokens_decoder())

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Raises ValueError, in one line, where the directory holds no usable tokenizer."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{directory} has no tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the Rust half raises nothing narrower
            raise ValueError(f"{path} cannot be read: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        return cls(backend, read_json_object(directory / "tokenizer_config.json"))

    @cached_property
    def size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: no text can have fewer tokens than its length / this."""
        return max(map(len, self.backend.get_vocab(with_added_tokens=True)), default=1)

    def token_id(self, token: str) -> int | None:
        found: int | None = self.backend.token_to_id(token)
        return found

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        bos = self._added_bos if add_special_tokens else None
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    @cached_property
    def _added_bos(self) -> int | None:
        if not self.config.get("add_bos_token") or "bos_token" not in self.special_tokens:
            return None
        return self.token_id(self.special_tokens["bos_token"])

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        text: str = self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_string(self, token_id: int) -> str:
        """The token as the vocabulary spells it; empty for an id without a token."""
        return self.backend.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes the token stands for, also where they are no whole UTF-8 character."""
        if token_id in self._added or not self._byte_of:
            return self.decode([token_id]).encode()
        return bytes(self._byte_of.get(char, 0x3F) for char in self.token_string(token_id))


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is no file. Raises ValueError otherwise."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return value


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _NAMED_TOKENS:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            tokens[name] = content
    return tokens


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    parts = decoder.get("decoders", [decoder])
    return any(part.get("type") == "ByteLevel" for part in parts)


def byte_alphabet() -> dict[str, int]:
    """Which byte each character of a byte-level vocabulary stands for.

    The alphabet of GPT-2's tokenizer: visible Latin-1 characters stand for themselves, the
    other bytes, in order, for the characters from U+0100 on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(0x100) if byte not in visible]
    alphabet = {chr(byte): byte for byte in visible}
    alphabet.update({chr(0x100 + place): byte for place, byte in enumerate(hidden)})
    return alphabet
