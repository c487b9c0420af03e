"""How much of the last turn's KV a next prompt may use: pure functions.

Stock engines match KV by position and never compare tokens. A history that was edited, shortened or
stripped of its reasoning would be answered from KV of other tokens, with status 200. So the router
compares the messages with those of the last turn. A prompt that does not extend them may only use
the longest prefix that was a whole prompt before, never tokens that the last turn *generated*.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum

import orjson

from router.common.exact_json import dumps
from router.common.structs import FrozenStruct
from router.conversations.entry import SCOPE_DIGEST_BYTES, Entry, PromptPrefix, ReuseScope
from router.conversations.prompt import Prompt
from router.openai.answers import Json

# A prompt ends with the start of an answer, which templates write differently once the answer is
# there; and text at its end may be tokenized differently. So the last tokens are never safe.
UNSAFE_TAIL_TOKENS = 16
BLOCK_SIZES = tuple(2**power for power in range(11))
MODEL_FIELDS = ("model", "cache_salt", "mm_processor_kwargs")
TOOL_FIELDS = ("tools", "functions")
TEMPLATE_FIELDS = (
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "truncate_prompt_tokens",
    "documents",
    "reasoning_effort",
)
# Templates with these arguments may write an empty trace before an answer, and leave it out of the
# history.
THINKING_ARGUMENTS = ("enable_thinking", "thinking")


class ReuseMatch(StrEnum):
    """How a prompt relates to the retained KV: extends all of it, a prefix of it, or none."""

    HIT = "hit"
    CUT = "cut"
    MISMATCH = "mismatch"


class ReuseDecision(FrozenStruct, frozen=True):
    """How much KV a prompt may use, and why not more.

    `reason` is model, tools, template, reasoning, rendering or history; empty for a hit. `tokens`
    is the number of leading tokens, all of them prompt before, that are certainly the same.
    """

    match: ReuseMatch
    reason: str = ""
    tokens: int = 0


def decide_reuse(entry: Entry, prompt: Prompt, scope: ReuseScope) -> ReuseDecision:
    """Decide how much of the entry's KV a request with this prompt and scope may use."""
    if scope.model != entry.scope.model:
        return ReuseDecision(ReuseMatch.MISMATCH, "model")
    if prompt.kind != entry.kind:
        return ReuseDecision(ReuseMatch.MISMATCH, "history")
    if scope.tools != entry.scope.tools:
        return ReuseDecision(ReuseMatch.MISMATCH, "tools")
    if scope.template != entry.scope.template:
        return ReuseDecision(ReuseMatch.MISMATCH, "template")
    tokens = 0
    for prefix in entry.prompts:
        if prefix.count <= prompt.traceless and _extends(prompt, prefix):
            tokens = max(tokens, (prefix.tokens or 0) - UNSAFE_TAIL_TOKENS)
    if entry.whole is None or not _extends(prompt, entry.whole):
        reason = "history"
    elif entry.inexact:
        reason = entry.inexact
    elif prompt.traceless < entry.whole.count:
        reason = "reasoning"
    else:
        return ReuseDecision(ReuseMatch.HIT, "", tokens)
    return ReuseDecision(ReuseMatch.CUT if tokens else ReuseMatch.MISMATCH, reason, tokens)


def _extends(prompt: Prompt, prefix: PromptPrefix) -> bool:
    return prompt.digest_at(prefix.count) == prefix.digest


def truncate_params(params: Json, tokens: int) -> Json | None:
    """Return `kv_transfer_params` for the whole blocks within the first `tokens` tokens.

    Returns None where it is uncertain which blocks those are: with several KV-cache groups, or with
    a block size that does not follow from the numbers.
    """
    groups, held = params.get("remote_block_ids"), params.get("remote_num_tokens")
    if not isinstance(groups, list) or len(groups) != 1 or type(held) is not int:
        return None
    blocks = groups[0]
    if not isinstance(blocks, list):
        return None
    sizes = [size for size in BLOCK_SIZES if -(-held // size) == len(blocks)]
    if len(sizes) != 1:
        return None
    kept = min(tokens, held) // sizes[0]
    if kept == 0:
        return None
    return {**params, "remote_block_ids": [blocks[:kept]], "remote_num_tokens": kept * sizes[0]}


def scope_of(body: Json) -> ReuseScope:
    """Return what two turns must have in common besides their messages."""
    tools = _present(body, TOOL_FIELDS)
    if body.get("tool_choice") == "none":
        tools = {**tools, "tool_choice": "none"}  # an engine may leave them out of the prompt
    return ReuseScope(
        _digest(_present(body, MODEL_FIELDS)),
        _digest(tools),
        _digest(_present(body, TEMPLATE_FIELDS)),
    )


def rewrites_history(body: Json) -> bool:
    """Return whether the template may render a past answer differently from its tokens."""
    arguments = body.get("chat_template_kwargs")
    return isinstance(arguments, dict) and any(name in arguments for name in THINKING_ARGUMENTS)


def _present(body: Json, names: tuple[str, ...]) -> Json:
    if body.keys().isdisjoint(names):
        return {}
    return {name: body[name] for name in names if body.get(name) not in (None, [], {})}


def _digest(content: Json) -> str:
    if not content:
        return EMPTY_DIGEST
    raw = dumps(content, orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(raw, digest_size=SCOPE_DIGEST_BYTES).hexdigest()


EMPTY_DIGEST = hashlib.blake2b(b"{}", digest_size=SCOPE_DIGEST_BYTES).hexdigest()
