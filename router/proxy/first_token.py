"""Where a prefiller's own token is the answer's first, and a decoder goes on from there. Pure.

A prefiller samples a token, with the client's parameters, and a decoder would sample it again. One
that is asked to hand over tells, in its kv_transfer_params, the ids of its prompt and of that token
(`begun`, with log-probabilities where they are wanted); a decoder that begins in mid-answer renders
and tokenizes nothing, says the token at once and computes the second. Both are engines of ours,
which say so, and render and read ids alike: what they must share for that is on their pages of
identity, and compared here.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from router.fleet.engine import Engine
from router.openai.request_fields import MAX_COMPLETION_TOKENS, MAX_TOKENS, MIN_TOKENS

Body = Mapping[str, object]
# What a second engine would need to know of the prompt besides its tokens, or says of it, or keeps
# count of from the answer's first token on: engines refuse to begin with these.
UNSUPPORTED_FIELDS = (
    "echo",
    "suffix",
    "prompt_embeds",
    "truncate_prompt_tokens",
    "return_prompt_text",
    "logprob_token_ids",
    "thinking_token_budget",
)
STOP, LENGTH = "stop", "length"


def renders_alike(engine: Engine, renders: Mapping[str, str]) -> bool:
    """As one whose `renders` those are. Who tells none is like nobody."""
    return bool(renders) and engine.capabilities.render_hashes == renders


def render_differences(one: Engine, other: Engine) -> str:
    """Names what two engines must share and do not."""
    mine, others = one.capabilities.render_hashes, other.capabilities.render_hashes
    names = [name for name in {**mine, **others} if mine.get(name) != others.get(name)]
    return ", ".join(sorted(names)) or "nothing that they tell"


def can_hand_over(body: Body) -> bool:
    """Whether the first token of this request tells another engine all that it needs."""
    if any(body.get(name) for name in UNSUPPORTED_FIELDS):
        return False
    if body.get("n") not in (None, 1):
        return False
    least = body.get(MIN_TOKENS)
    if least is not None and type(least) is not int:
        return False
    messages = body.get("messages")
    return not isinstance(messages, list) or all(map(_has_only_text, messages))


def asks_one_token(body: Body) -> bool:
    """Where a chat says both, the newer word counts."""
    most = body.get(MAX_COMPLETION_TOKENS)
    return (body.get(MAX_TOKENS) if most is None else most) == 1


def wants_logprobs(wanted: object) -> bool:
    """Of log-probabilities: 0 is one, though it equals False."""
    return wanted is not None and wanted is not False


class _FinishedChoice(msgspec.Struct):
    finish_reason: str | None = None


_choices = msgspec.json.Decoder(list[_FinishedChoice]).decode


def finish_reason_of(choices: bytes) -> str | None:
    """Of the one choice of a prefiller's answer: why it ended. None where there is not one."""
    try:
        (choice,) = _choices(choices)
    except (msgspec.DecodeError, ValueError):
        return None
    return choice.finish_reason


def _has_only_text(message: object) -> bool:
    """Of what else there is in a message, a decoder would need more than the tokens."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return True
    return all(isinstance(part, Mapping) and part.get("type") == "text" for part in content)
