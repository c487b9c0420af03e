"""How much of the last turn's KV a next prompt may use: pure functions.

Stock engines match KV by position and never compare tokens, so a history that was edited, shortened
or stripped of its reasoning would be answered from KV of other tokens, with status 200. Here its
messages are compared with those of the last turn. What does not extend them is cut back to the
longest beginning that was a whole prompt before; what the last turn *generated* is never in a cut.
"""

from __future__ import annotations

from enum import StrEnum

from router.common.records import Value
from router.conversations.entry import Entry, PromptPrefix, ReuseScope
from router.conversations.prompt import Prompt
from router.openai.answers import Json

# The end of a prompt is the start of an answer, which templates write in another way once the
# answer is there; and text is tokenized otherwise at its end. So the last tokens are never safe.
MARGIN_TOKENS = 16
BLOCK_SIZES = tuple(2**power for power in range(11))


class ReuseMatch(StrEnum):
    HIT = "hit"
    CUT = "cut"
    MISMATCH = "mismatch"


class ReuseDecision(Value, frozen=True):
    """`tokens`: how many leading tokens, all of them prompt before, are surely the same."""

    fit: ReuseMatch
    reason: str = ""
    tokens: int = 0


def decide_reuse(entry: Entry, prompt: Prompt, scope: ReuseScope) -> ReuseDecision:
    """`reason` is model, tools, template, reasoning, rendering or history; empty for a hit."""
    if scope.model != entry.scope.model:
        return ReuseDecision(ReuseMatch.MISMATCH, "model")
    if prompt.kind != entry.kind:
        return ReuseDecision(ReuseMatch.MISMATCH, "history")
    if scope.tools != entry.scope.tools:
        return ReuseDecision(ReuseMatch.MISMATCH, "tools")
    if scope.template != entry.scope.template:
        return ReuseDecision(ReuseMatch.MISMATCH, "template")
    tokens = max((_tokens(mark) for mark in entry.prompts if _is_safe(mark, prompt)), default=0)
    reason = _why_not_whole(entry, prompt)
    if reason is None:
        return ReuseDecision(ReuseMatch.HIT, "", tokens)
    return (
        ReuseDecision(ReuseMatch.CUT, reason, tokens)
        if tokens
        else ReuseDecision(ReuseMatch.MISMATCH, reason)
    )


def _why_not_whole(entry: Entry, prompt: Prompt) -> str | None:
    if entry.whole is None or not _extends(prompt, entry.whole):
        return "history"
    if entry.inexact:
        return entry.inexact
    return "reasoning" if prompt.plain < entry.whole.count else None


def _is_safe(mark: PromptPrefix, prompt: Prompt) -> bool:
    return mark.count <= prompt.plain and _extends(prompt, mark)


def _extends(prompt: Prompt, mark: PromptPrefix) -> bool:
    return prompt.digest_at(mark.count) == mark.digest


def _tokens(mark: PromptPrefix) -> int:
    return max(0, (mark.tokens or 0) - MARGIN_TOKENS)


def truncate_params(params: Json, tokens: int) -> Json | None:
    """The decoder's params, of whole blocks within the first `tokens` tokens.

    None where it is not certain which blocks those are: several KV-cache groups, or a block size
    that the numbers do not tell.
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
