"""Answers with status 200 that a decoder has ended for want of room, as it was asked to.

Of a stream the resume buffer has what was said. An answer that is not streamed is looked at before
the client has any of it: it tells its tokens (`begun`), for another decoder to say all of them.
"""

from __future__ import annotations

import msgspec

from router.http_client.engine_answer import EngineAnswer
from router.openai.answers import Json, choices_of, read_generated_tokens
from router.openai.errors import PreemptedError
from router.proxy.threshold_probe import REJECTION

NEEDLE = b'"preempted"'
BACK = (REJECTION, "preempted")
# vLLM's chat, of one that has called a tool by then.
BACK_FROM_TOOLS = ("tool_calls", "preempted")


class _ReturnedChoice(msgspec.Struct, gc=False):
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class _Whole(msgspec.Struct, gc=False):
    choices: list[_ReturnedChoice]
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


_whole = msgspec.json.Decoder(_Whole).decode


def handed_back(answer: EngineAnswer, word: Json | None) -> PreemptedError | None:
    """Return the PreemptedError for an answer that was handed back, else None. `word` is the first
    event of a stream with content."""
    if answer.is_event_stream:
        return PreemptedError() if word is not None and is_handed_back(word) else None
    return _in_whole(answer.peek()) if answer.is_complete else None


def is_handed_back(content: Json) -> bool:
    return any(
        (choice.get("finish_reason"), choice.get("stop_reason")) == BACK
        for choice in choices_of(content)
    )


def _in_whole(raw: bytes) -> PreemptedError | None:
    if raw.find(NEEDLE) < 0:
        return None
    try:
        content = _whole(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    reasons = [(choice.finish_reason, choice.stop_reason) for choice in content.choices]
    begun = read_generated_tokens(bytes(content.kv_transfer_params))
    if BACK in reasons or (begun is not None and BACK_FROM_TOOLS in reasons):
        return PreemptedError(begun)
    return None
