"""A model's chat template: Jinja, rendered as Hugging Face's `apply_chat_template` does it.

Templates come with the model and their arguments from clients, so both run in Jinja's sandbox and
every failure of theirs is a ValueError.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

from engine_ext.reference.tokenizer import Tokenizer

Message = Mapping[str, Any]


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Raises ValueError for a template that is no valid Jinja."""
        try:
            self._template = _environment().from_string(source)
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
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. `arguments` are the request's `chat_template_kwargs`; ours go first.

        Raises ValueError with the template's own words where it refuses the conversation.
        """
        names = {
            **(arguments or {}),
            **self._special_tokens,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            rendered = self._template.render(names)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        except Exception as error:
            raise ValueError(f"the chat template fails on these messages: {error!r}") from error
        return _cut_after(rendered, messages[-1]) if continue_final_message else rendered


def chat_template_source(directory: Path, tokenizer: Tokenizer) -> str | None:
    """`chat_template.jinja`, else what `tokenizer_config.json` has; None for a base model."""
    path = directory / "chat_template.jinja"
    return path.read_text() if path.is_file() else _configured(tokenizer.config)


def _configured(config: Mapping[str, Any]) -> str | None:
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _cut_after(rendered: str, final: Message) -> str:
    """Leaves the last message open, so that the model goes on writing it."""
    content = str(final.get("content") or "").strip()
    place = rendered.rfind(content)
    if place < 0 or not content:
        raise ValueError("continue_final_message needs a last message that the template shows")
    return rendered[: place + len(content)]


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(value: Any, indent: int | None = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
