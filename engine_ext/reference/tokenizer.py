"""What a Hugging Face directory says about text: its tokenizer and its chat template."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class Tokenizer:
    """`tokenizer.json`, and from `tokenizer_config.json` the named special tokens.

    `backend` is shared with the engine's detokenizer; it is safe to use from several threads.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: dict[str, Any] | None = None) -> None:
        self.backend = backend
        self.config = config or {}
        self.special_tokens: dict[str, str] = {}
        for name in _NAMED_TOKENS:
            value = self.config.get(name)
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                self.special_tokens[name] = content
        decoder = json.loads(backend.to_str()).get("decoder") or {}
        parts = decoder.get("decoders", [decoder])
        is_byte_level = any(part.get("type") == "ByteLevel" for part in parts)
        self._byte_of = byte_alphabet() if is_byte_level else {}
        self._added = frozenset(backend.get_added_tokens_decoder())
        # The bytes of the longest token; 0 if tokens are not the bytes of the text as it is.
        is_exact = is_byte_level and backend.normalizer is None
        self._longest = max((len(name.encode()) for name in backend.get_vocab()), default=0)
        self._longest *= is_exact

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Raises ValueError, in one line, if the directory holds no usable tokenizer."""
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

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        # `backend.encode` holds the GIL to its end, and no thread could answer a probe meanwhile.
        (found,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = found.ids
        return ids

    def least_tokens(self, text: str) -> int:
        """A number of tokens that the text has at least, found without encoding it."""
        return len(text.encode("utf-8", "replace")) // self._longest if self._longest else 0

    def token_bytes(self, token_id: int) -> bytes:
        """The token's bytes, even if they are no whole UTF-8 character."""
        if token_id in self._added or not self._byte_of:
            text: str = self.backend.decode([token_id], skip_special_tokens=False)
            return text.encode()
        name = self.backend.id_to_token(token_id) or ""
        return bytes(self._byte_of.get(char, 0x3F) for char in name)


class ChatTemplate:
    """Jinja, rendered as Hugging Face's `apply_chat_template` does it.

    Templates come with the model and their arguments from clients, so both run in Jinja's sandbox
    and every failure of theirs is a ValueError.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Raises ValueError for a template that is no valid Jinja."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template is not valid: {error}") from error
        self._special_tokens = dict(special_tokens or {})

    @classmethod
    def load(cls, directory: Path, tokenizer: Tokenizer) -> "ChatTemplate | None":
        """None for a base model. Raises ValueError for a template that is no valid Jinja."""
        source = chat_template_source(directory, tokenizer)
        return None if source is None else cls(source, tokenizer.special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. `arguments` are the request's `chat_template_kwargs`; ours go first.

        Raises ValueError with the template's own words if it refuses the conversation.
        """
        names = {
            **(arguments or {}),
            **self._special_tokens,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": True,
        }
        try:
            return self._template.render(names)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        except Exception as error:
            raise ValueError(f"the chat template fails on these messages: {error!r}") from error


def chat_template_source(directory: Path, tokenizer: Tokenizer) -> str | None:
    """`chat_template.jinja`, else what `tokenizer_config.json` has; None for a base model."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text()
    value = tokenizer.config.get("chat_template")
    if isinstance(value, list):
        value = {entry.get("name"): entry.get("template") for entry in value}.get("default")
    return value if isinstance(value, str) else None


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no file. Raises ValueError otherwise."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return value


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


def _to_json(value: Any, indent: int | None = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
