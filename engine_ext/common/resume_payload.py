"""The resume payload: the prompt and the first tokens of an answer that another engine continues.

It is the field `begun` of `kv_transfer_params`, which only routers and engines may send:

    "begun": {"prompt_token_ids": "...", "output_token_ids": "...", "spoken": 0, "logprobs": [...]}

An engine that gets it does not render or tokenize the prompt, and continues as if it had generated
the output tokens itself. `spoken` counts the output tokens that the client already has. The field
comes from one of three sources:

* Hand-over of the first token: a prefill engine that is asked with `"hand_over": true` returns the
  ids of its prompt and of the token that it has sampled.
* Stream resume: a decode engine that is asked with `"tell_token_ids": "output"` writes a comment
  before each event of its stream, with the ids of the event's tokens. With `"all"`, the first event
  also has a comment with the prompt's ids. Comment and event are written together, so a reader has
  both or none:

      : prompt_token_ids AQAAAgAA
      : token_ids BwAA
      data: {"id": ...}

* Preemption return: a decode engine that is asked with `"hand_back": true` ends a request instead
  of preempting it, with the finish reason `cache_threshold` and the stop reason `preempted`. The
  tokens of a stream were reported in its comments; an answer that is not streamed has `begun`.

Token ids are written as base64 of three bytes each, lowest byte first: four characters where a JSON
list takes five to eight.
"""

import base64
import binascii
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KEY = "begun"
HAND_OVER = "hand_over"
TELL_TOKEN_IDS = "tell_token_ids"
HAND_BACK = "hand_back"
PREEMPTED = "preempted"
"""The stop reason of a preemption return."""
OUTPUT, ALL = "output", "all"
MAX_ID = (1 << 24) - 1
MAX_TOKENS = 1 << 24
MAX_LOGPROBS = 1 << 16
"""The limit for all tokens together. Our router sends those of one token."""

LOWEST = -9999.0
"""The value for minus infinity, which JSON lacks; vLLM uses the same."""

Logprob = tuple[int, float]
"""A token and its log-probability."""


class ResumePayloadError(ValueError):
    """A malformed resume payload. The message names the field and the fault."""


@dataclass(frozen=True, slots=True)
class ResumePayload:
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...] = ()
    num_sent: int = 0
    """How many of the output tokens the client has. Their text is not sent again."""
    logprobs: tuple[tuple[Logprob, ...], ...] = ()
    """Log-probabilities of the tokens from `num_sent` on, if known: for each token its own first,
    then those of the likeliest tokens."""

    @property
    def unsent_token_ids(self) -> tuple[int, ...]:
        return self.output_token_ids[self.num_sent :]

    def to_wire(self) -> dict[str, Any]:
        num_sent = {"spoken": self.num_sent} if self.num_sent else {}
        logprobs = {"logprobs": [list(map(list, each)) for each in self.logprobs]}
        return {
            "prompt_token_ids": encode_token_ids(self.prompt_token_ids),
            "output_token_ids": encode_token_ids(self.output_token_ids),
            **num_sent,
            **(logprobs if self.logprobs else {}),
        }


def read_resume_payload(params: object) -> ResumePayload | None:
    """Return the payload in `kv_transfer_params`, or None if there is none. `params` may be any
    JSON.

    Raises ResumePayloadError.
    """
    raw = params.get(KEY) if isinstance(params, Mapping) else None
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise ResumePayloadError(f"{KEY} is not an object")
    prompt = _ids(raw, "prompt_token_ids")
    output = _ids(raw, "output_token_ids")
    if not prompt:
        raise ResumePayloadError(f"{KEY}.prompt_token_ids is empty")
    num_sent = raw.get("spoken", 0)
    if type(num_sent) is not int or not 0 <= num_sent <= len(output):
        raise ResumePayloadError(f"{KEY}.spoken is not a number of output tokens")
    return ResumePayload(
        prompt, output, num_sent, _logprobs(raw.get("logprobs"), output[num_sent:])
    )


def token_id_comment(token_ids: Sequence[int], prompt_token_ids: Sequence[int] = ()) -> str:
    """Return the comment lines before an event whose text is that of `token_ids`."""
    prompt = (
        f": prompt_token_ids {encode_token_ids(prompt_token_ids)}\n" if prompt_token_ids else ""
    )
    return f"{prompt}: token_ids {encode_token_ids(token_ids)}\n" if token_ids else prompt


def logprobs_fit(num_tokens: int, num_likeliest: int | None) -> bool:
    """Return True if a payload may hold log-probabilities of so many tokens, if any are wanted."""
    if num_likeliest is None:
        return True
    return num_likeliest >= 0 and num_tokens * (1 + num_likeliest) <= MAX_LOGPROBS


def logprob_entry(token_id: int, logprob: float) -> list[float]:
    """Return an entry of the field `logprobs`."""
    return [token_id, min(0.0, max(LOWEST, logprob))]


def encode_token_ids(token_ids: Sequence[int]) -> str:
    """Return token ids as base64. Raises ResumePayloadError for a value that is no token id."""
    try:
        wide = array("I", token_ids)
    except (TypeError, OverflowError) as error:
        raise ResumePayloadError(f"not token ids: {error}") from None
    if wide and max(wide) > MAX_ID:
        raise ResumePayloadError(f"a token id above {MAX_ID}")
    if sys.byteorder == "big":
        wide.byteswap()
    four = wide.tobytes()
    three = bytearray(3 * len(wide))
    for place in range(3):
        three[place::3] = four[place::4]
    return base64.b64encode(three).decode("ascii")


def decode_token_ids(text: str) -> tuple[int, ...]:
    """Return the token ids in base64 text. Raises ResumePayloadError."""
    try:
        three = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ResumePayloadError("is not base64") from None
    count, rest = divmod(len(three), 3)
    if rest:
        raise ResumePayloadError("is cut in the middle of a token id")
    if count > MAX_TOKENS:
        raise ResumePayloadError(f"holds more than {MAX_TOKENS} token ids")
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
        raise ResumePayloadError(f"{KEY}.{name} is not a string")
    try:
        return decode_token_ids(text)
    except ResumePayloadError as error:
        raise ResumePayloadError(f"{KEY}.{name} {error}") from None


def _logprobs(raw: object, unsent_token_ids: Sequence[int]) -> tuple[tuple[Logprob, ...], ...]:
    if raw is None:
        return ()
    if not isinstance(raw, list) or len(raw) != len(unsent_token_ids):
        raise ResumePayloadError(f"{KEY}.logprobs is not a list with an entry per unspoken token")
    if sum(len(each) for each in raw if isinstance(each, list)) > MAX_LOGPROBS:
        raise ResumePayloadError(f"{KEY}.logprobs holds more than {MAX_LOGPROBS}")
    return tuple(_of_token(each, token) for each, token in zip(raw, unsent_token_ids, strict=True))


def _of_token(raw: object, token: int) -> tuple[Logprob, ...]:
    entries = tuple(map(_logprob, raw)) if isinstance(raw, list) else ()
    if not entries or entries[0][0] != token:
        raise ResumePayloadError(f"{KEY}.logprobs: a token's own is not the first of its entry")
    return entries


def _logprob(raw: object) -> Logprob:
    match raw:
        case [int(token), float() | int() as value] if not isinstance(token, bool):
            if 0 <= token <= MAX_ID and not isinstance(value, bool) and value <= 0:
                # What is lower is no float, or none that JSON has.
                return token, float(max(LOWEST, value))
    raise ResumePayloadError(f"{KEY}.logprobs: not pairs of a token id and a number up to 0")
