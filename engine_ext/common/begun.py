"""An answer that begins in the middle: its prompt and its first tokens, made elsewhere.

Inside `kv_transfer_params`, from a router or another engine only. A prefill engine that is asked
with `"hand_over": true` answers with `begun`: the ids of its prompt and of what it has sampled. An
engine that is given `begun` renders nothing and goes on as if it had made those tokens itself.

    "begun": {"prompt_token_ids": "...", "output_token_ids": "...", "spoken": 0, "logprobs": [...]}

Who is to go on with an answer has to know it. A decode engine that is asked, by `"tell_token_ids":
"output"`, puts a comment before each event of its stream, which names the tokens that it says; by
`"all"`, one with those of the prompt before the first. In the same event, so that a reader has both
or none:

    : prompt_token_ids AQAAAgAA
    : token_ids BwAA
    data: {"id": ...}

A decode engine that is asked, by `"hand_back": true`, does not compute an answer again that it has
to preempt: it ends it, with the finish reason `cache_threshold` and the stop reason `preempted`.
What a stream has said is told by then; an answer that is not streamed has `begun`.

Ids travel as base64 of three bytes each, the lowest first: four characters where a JSON list takes
five to eight, and read in one go.
"""

import base64
import binascii
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KEY = "begun"
ASK = "hand_over"
TELL = "tell_token_ids"
HAND_BACK = "hand_back"
PREEMPTED = "preempted"
"""The stop reason of what is handed back."""
OUTPUT, ALL = "output", "all"
MAX_ID = (1 << 24) - 1
MAX_TOKENS = 1 << 24
MAX_LOGPROBS = 1 << 16
"""Of all tokens together: ours asks for those of one."""

LOWEST = -9999.0
"""JSON has no infinity; vLLM says this one."""

Logprob = tuple[int, float]
"""A token and its log-probability."""


class BegunError(ValueError):
    """What was given makes no sense; the message says what and where."""


@dataclass(frozen=True, slots=True)
class EngineResumeState:
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...] = ()
    spoken: int = 0
    """How many of the output's tokens the client has: what they say is not said again."""
    logprobs: tuple[tuple[Logprob, ...], ...] = ()
    """Of the output's tokens from `spoken` on, where they are known: first the token's own, then
    those of the likeliest."""

    @property
    def unspoken(self) -> tuple[int, ...]:
        return self.output_token_ids[self.spoken :]

    def to_wire(self) -> dict[str, Any]:
        spoken = {"spoken": self.spoken} if self.spoken else {}
        logprobs = {"logprobs": [list(map(list, each)) for each in self.logprobs]}
        return {
            "prompt_token_ids": packed(self.prompt_token_ids),
            "output_token_ids": packed(self.output_token_ids),
            **spoken,
            **(logprobs if self.logprobs else {}),
        }


def begun_in(params: object) -> EngineResumeState | None:
    """Of `kv_transfer_params`, whatever they are; None where nothing has begun.

    Raises BegunError.
    """
    raw = params.get(KEY) if isinstance(params, Mapping) else None
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise BegunError(f"{KEY} is not an object")
    prompt = _ids(raw, "prompt_token_ids")
    output = _ids(raw, "output_token_ids")
    if not prompt:
        raise BegunError(f"{KEY}.prompt_token_ids is empty")
    spoken = raw.get("spoken", 0)
    if type(spoken) is not int or not 0 <= spoken <= len(output):
        raise BegunError(f"{KEY}.spoken is not a number of output tokens")
    return EngineResumeState(
        prompt, output, spoken, _logprobs(raw.get("logprobs"), output[spoken:])
    )


def told(token_ids: Sequence[int], prompt_token_ids: Sequence[int] = ()) -> str:
    """What stands before the `data:` of an event that says `token_ids`."""
    prompt = f": prompt_token_ids {packed(prompt_token_ids)}\n" if prompt_token_ids else ""
    return f"{prompt}: token_ids {packed(token_ids)}\n" if token_ids else prompt


def fit_in(num_tokens: int, num_likeliest: int | None) -> bool:
    """Whether `begun` may hold the log-probabilities of so many tokens, if any are asked for."""
    if num_likeliest is None:
        return True
    return num_likeliest >= 0 and num_tokens * (1 + num_likeliest) <= MAX_LOGPROBS


def written(token_id: int, logprob: float) -> list[float]:
    """An entry of `logprobs`."""
    return [token_id, min(0.0, max(LOWEST, logprob))]


def packed(token_ids: Sequence[int]) -> str:
    """Raises BegunError for what is no token id."""
    try:
        wide = array("I", token_ids)
    except (TypeError, OverflowError) as error:
        raise BegunError(f"not token ids: {error}") from None
    if wide and max(wide) > MAX_ID:
        raise BegunError(f"a token id above {MAX_ID}")
    if sys.byteorder == "big":
        wide.byteswap()
    four = wide.tobytes()
    three = bytearray(3 * len(wide))
    for place in range(3):
        three[place::3] = four[place::4]
    return base64.b64encode(three).decode("ascii")


def unpacked(text: str) -> tuple[int, ...]:
    """Raises BegunError."""
    try:
        three = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise BegunError("is not base64") from None
    count, rest = divmod(len(three), 3)
    if rest:
        raise BegunError("is cut in the middle of a token id")
    if count > MAX_TOKENS:
        raise BegunError(f"holds more than {MAX_TOKENS} token ids")
    four = bytearray(4 * count)
    for place in range(3):
        four[place::4] = three[place::3]
    wide = array("I", bytes(four))
    if sys.byteorder == "big":
        wide.byteswap()
    return tuple(wide)


def _ids(raw: Mapping[str, Any], name: str) -> tuple[int, ...]:
    text = raw.get(name, "")
    if not isinstance(text, str):
        raise BegunError(f"{KEY}.{name} is not a string")
    try:
        return unpacked(text)
    except BegunError as error:
        raise BegunError(f"{KEY}.{name} {error}") from None


def _logprobs(raw: object, unspoken: Sequence[int]) -> tuple[tuple[Logprob, ...], ...]:
    if raw is None:
        return ()
    if not isinstance(raw, list) or len(raw) != len(unspoken):
        raise BegunError(f"{KEY}.logprobs is not a list with an entry per unspoken token")
    if sum(len(each) for each in raw if isinstance(each, list)) > MAX_LOGPROBS:
        raise BegunError(f"{KEY}.logprobs holds more than {MAX_LOGPROBS}")
    return tuple(_of_token(each, token) for each, token in zip(raw, unspoken, strict=True))


def _of_token(raw: object, token: int) -> tuple[Logprob, ...]:
    entries = tuple(map(_logprob, raw)) if isinstance(raw, list) else ()
    if not entries or entries[0][0] != token:
        raise BegunError(f"{KEY}.logprobs: a token's own is not the first of its entry")
    return entries


def _logprob(raw: object) -> Logprob:
    match raw:
        case [int(token), float() | int() as value] if not isinstance(token, bool):
            if 0 <= token <= MAX_ID and not isinstance(value, bool) and value <= 0:
                # What is lower is no float, or none that JSON has.
                return token, float(max(LOWEST, value))
    raise BegunError(f"{KEY}.logprobs: not pairs of a token id and a number up to 0")
