"""Decides whether a prefill engine hands the first token of an answer over to a decode engine.

A prefill engine samples one token with the client's parameters, and a decode engine would sample it
again. With a hand-over, the prefill engine returns the ids of the prompt and of its token in its
kv_transfer_params (`begun`, with log-probabilities if the client wants them). The decode engine
then neither renders nor tokenizes: it sends that token at once and computes the second one. Both
engines need engine_ext, and must give token ids the same meaning. Their identity pages contain
hashes of everything that this depends on, which are compared here.
"""

from __future__ import annotations

from collections.abc import Mapping

from router.fleet.engine import Engine
from router.openai.request_fields import MAX_COMPLETION_TOKENS, MAX_TOKENS, MIN_TOKENS

Body = Mapping[str, object]
# Fields for which the second engine would need more than the token ids. Engines reject a hand-over
# with any of these.
UNSUPPORTED_FIELDS = frozenset((
    "echo",
    "suffix",
    "prompt_embeds",
    "truncate_prompt_tokens",
    "return_prompt_text",
    "logprob_token_ids",
    "thinking_token_budget",
    "token_ids",  # of /inference/v1/generate
))  # fmt: skip


def renders_alike(engine: Engine, renders: Mapping[str, str]) -> bool:
    """Return True if the engine gives token ids the same meaning as an engine with the hashes
    `renders`. An engine that reports no hashes matches no other engine."""
    return bool(renders) and engine.capabilities.render_hashes == renders


def render_differences(one: Engine, other: Engine) -> str:
    """Return the names of the hashes in which two engines differ, for a log line."""
    mine, others = one.capabilities.render_hashes, other.capabilities.render_hashes
    names = [name for name in {**mine, **others} if mine.get(name) != others.get(name)]
    return ", ".join(sorted(names)) or "nothing that they report"


def can_hand_over(body: Body) -> bool:
    """Return True if token ids are all that another engine needs to continue this request."""
    if not UNSUPPORTED_FIELDS.isdisjoint(body) and any(map(body.get, UNSUPPORTED_FIELDS)):
        return False
    if body.get("n") not in (None, 1):
        return False
    least = body.get(MIN_TOKENS)
    if least is not None and type(least) is not int:
        return False
    messages = body.get("messages")
    return not isinstance(messages, list) or all(map(_has_only_text, messages))


def asks_one_token(body: Body) -> bool:
    """Return True if the answer has at most one token. max_completion_tokens takes precedence over
    max_tokens."""
    most = body.get(MAX_COMPLETION_TOKENS)
    return (body.get(MAX_TOKENS) if most is None else most) == 1


def wants_logprobs(wanted: object) -> bool:
    """Return True if the value of a field asks for log-probabilities. 0 does, False does not."""
    return wanted is not None and wanted is not False


def _has_only_text(message: object) -> bool:
    """Return True if a chat message contains no images or other media."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return True
    return all(isinstance(part, dict) and part.get("type") == "text" for part in content)
