"""What must be the same in two turns besides their messages, for one to reuse the other's KV."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import orjson

from router.common.exact_json import dumps
from router.conversations.entry import SCOPE_BYTES, ReuseScope
from router.openai.answers import Json

MODEL = ("model", "cache_salt", "mm_processor_kwargs")
TOOLS = ("tools", "functions")
TEMPLATE = (
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "truncate_prompt_tokens",
    "documents",
    "reasoning_effort",
)
# Templates that may write an empty trace before an answer and leave it out of the history.
THINKING = ("enable_thinking", "thinking")
SHORT = 256


def scope_of(body: Json) -> ReuseScope:
    tools = _present(body, TOOLS)
    if body.get("tool_choice") == "none":
        tools = {**tools, "tool_choice": "none"}  # an engine may leave them out of the prompt
    return ReuseScope(
        _digest(_present(body, MODEL)), _digest(tools), _digest(_present(body, TEMPLATE))
    )


def rewrites_history(body: Json) -> bool:
    """Whether the template may render an answer in the history otherwise than it was generated."""
    arguments = body.get("chat_template_kwargs")
    return isinstance(arguments, dict) and any(name in arguments for name in THINKING)


def _present(body: Json, names: tuple[str, ...]) -> Json:
    if body.keys().isdisjoint(names):
        return {}
    return {name: body[name] for name in names if body.get(name) not in (None, [], {})}


def _digest(content: Json) -> str:
    if not content:
        return NOTHING
    raw = dumps(content, orjson.OPT_SORT_KEYS)
    return _known(raw) if len(raw) <= SHORT else _hashed(raw)


def _hashed(raw: bytes) -> str:
    return hashlib.blake2b(raw, digest_size=SCOPE_BYTES).hexdigest()


# A model's name comes with every turn, and most have no tools.
_known = lru_cache(maxsize=256)(_hashed)
NOTHING = _hashed(b"{}")
