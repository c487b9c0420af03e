"""Where a prefiller's own token is the answer's first, and a decoder goes on from there. Pure.

A prefiller samples a token, with the client's parameters, and a decoder would sample it again. One
that is asked to hand over tells, in its kv_transfer_params, the ids of its prompt and of that token
(`begun`); a decoder that begins in mid-answer renders and tokenizes nothing, says the token at once
and computes the second. Both are engines of ours, which say so, and render and read ids alike:
what they must share for that is on their pages of identity, and compared here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from router.fleet.engine import Engine
from router.flows.fields import MAX_COMPLETION_TOKENS, MAX_TOKENS, MIN_TOKENS

Body = Mapping[str, object]
BEGUN = re.compile(rb'"begun"\s*:\s*\{')
# Forms that an answer is held to, from its first token on: not shown yet to go on rightly.
GUIDED = frozenset(
    (
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "structural_tag",
    )
)
# What the second engine would need of the prompt, besides its tokens, or says of it.
OF_THE_PROMPT = frozenset(("echo", "prompt_embeds", "suffix"))
AS_IDS = "return_tokens_as_token_ids"
NEVER = GUIDED | OF_THE_PROMPT
# By which a token is named where its text is not wanted.
NAME = "token_id:"
STOP, LENGTH = "stop", "length"
MOST_LOGPROBS = 4096


def read_alike(one: Engine, other: Engine) -> bool:
    mine = one.learned.renders
    return bool(mine) and mine == other.learned.renders


def difference(one: Engine, other: Engine) -> str:
    """Names what two engines must share and do not."""
    mine, others = one.learned.renders, other.learned.renders
    names = [name for name in {**mine, **others} if mine.get(name) != others.get(name)]
    return ", ".join(sorted(names)) or "nothing that they tell"


def may_be_handed(body: Body) -> bool:
    """Whether the first token of this request tells another engine all that it needs."""
    if any(body.get(name) for name in NEVER) or AS_IDS in body:
        return False
    form, choice = body.get("response_format"), body.get("tool_choice")
    if choice not in (None, "auto", "none") or not _is_text(form):
        return False
    least = body.get(MIN_TOKENS)
    if least is not None and type(least) is not int:
        return False
    messages = body.get("messages")
    return not isinstance(messages, list) or all(map(_is_only_text, messages))


def asks_one_token(body: Body) -> bool:
    """Where a chat says both, the newer word counts."""
    most = body.get(MAX_COMPLETION_TOKENS)
    return (body.get(MAX_TOKENS) if most is None else most) == 1


def wants_logprobs(body: Body) -> bool:
    return is_number(body.get("logprobs"))


def is_number(wanted: object) -> bool:
    """Of log-probabilities: 0 is one, though it equals False."""
    return wanted is not None and wanted is not False


class Sampled(msgspec.Struct, frozen=True):
    """What a prefiller has sampled. `logprobs`: pairs of id and log-probability, the token's own
    first; None where they were not told, or make no sense."""

    finish_reason: str | None
    logprobs: list[tuple[int, float]] | None

    def is_all(self, body: Body) -> bool:
        """Whether that is the whole answer."""
        if self.finish_reason == LENGTH:
            return asks_one_token(body)
        return self.finish_reason == STOP

    def is_begun(self, body: Body) -> bool:
        """Whether a decoder can go on from it, and say it."""
        if wants_logprobs(body) and self.logprobs is None:
            return False
        return self.finish_reason in (STOP, LENGTH)


class _Top(msgspec.Struct):
    token: str = ""
    logprob: float = 0.0


class _Chat(_Top):
    top_logprobs: list[_Top] | None = None


class _Logprobs(msgspec.Struct):
    """Of a chat, or of a completion."""

    content: list[_Chat] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    logprobs: msgspec.Raw = msgspec.Raw(b"null")


_choices = msgspec.json.Decoder(list[_Choice]).decode
_logprobs = msgspec.json.Decoder(_Logprobs | None).decode


def sampled_in(choices: bytes) -> Sampled | None:
    """Of the choices of a prefiller's answer; None where there is not one, or it makes no sense."""
    try:
        (choice,) = _choices(choices)
    except (msgspec.DecodeError, ValueError):
        return None
    try:
        pairs = _pairs(_logprobs(choice.logprobs))
    except (msgspec.DecodeError, ValueError, IndexError):
        pairs = None
    return Sampled(choice.finish_reason, pairs)


def _pairs(told: _Logprobs | None) -> list[tuple[int, float]] | None:
    """Of the one token. Raises ValueError, IndexError."""
    if told is None:
        return None
    if told.content is not None:
        own = told.content[0]
        entries = [(own.token, own.logprob)]
        entries += [(top.token, top.logprob) for top in own.top_logprobs or ()]
    elif told.tokens and told.token_logprobs and told.token_logprobs[0] is not None:
        tops = (told.top_logprobs or [None])[0] or {}
        entries = [(told.tokens[0], told.token_logprobs[0]), *tops.items()]
    else:
        return None
    return [(_id_of(name), value) for name, value in entries[:MOST_LOGPROBS]]


def _id_of(name: str) -> int:
    """Raises ValueError."""
    if not name.startswith(NAME):
        raise ValueError(name)
    return int(name.removeprefix(NAME))


def _is_text(form: object) -> bool:
    return form is None or (isinstance(form, Mapping) and form.get("type") == "text")


def _is_only_text(message: object) -> bool:
    """Of what else there is in a message, a decoder would need more than the tokens."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return True
    return all(isinstance(part, Mapping) and part.get("type") == "text" for part in content)
