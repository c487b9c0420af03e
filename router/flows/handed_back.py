"""Answers with status 200 that a decoder has ended for want of room, as it was asked to.

Of a stream the journal has what was said. An answer that is not streamed is looked at before the
client has any of it: it tells its tokens (`begun`), for another decoder to say all of them.
"""

from __future__ import annotations

import msgspec

from router.conversations.said import Json
from router.flows.begun import begun_in
from router.flows.errors import EngineUnavailableError, PreemptedError
from router.flows.screen import first_says, opening
from router.flows.trial import REJECTION
from router.upstream.answer import Answer

NEEDLE = b'"preempted"'
BACK = (REJECTION, "preempted")
# vLLM's chat, of one that has called a tool by then.
BACK_FROM_TOOLS = ("tool_calls", "preempted")


class _Choice(msgspec.Struct, gc=False):
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class _Whole(msgspec.Struct, gc=False):
    choices: list[_Choice]
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


_whole = msgspec.json.Decoder(_Whole).decode


async def take_back(answer: Answer, limit: int) -> None:
    """Raises PreemptedError for what was handed back, before anything of it is passed on; and as
    `Answer.read` does."""
    if answer.is_event_stream:
        block = opening(answer.held())
        found = PreemptedError() if first_says(block, NEEDLE, is_handed_back) else None
    else:
        found = _in_whole(await answer.all_of_it(limit))
    if found is not None:
        raise found


def require_kept(begun: bytes, is_stream: bool) -> None:
    """Raises EngineUnavailableError for what was handed back, and nobody had asked for that: an
    engine may be configured to, and its page of identity be unread still. `begun`: a whole answer,
    or a stream's opening."""
    if begun.find(NEEDLE) < 0:
        return
    if is_stream:
        is_back = first_says(begun, NEEDLE, is_handed_back)
    else:
        is_back = _in_whole(begun) is not None
    if is_back:
        raise EngineUnavailableError("the decode engine handed back what it was to answer")


def is_handed_back(content: Json) -> bool:
    choices = content.get("choices")
    return isinstance(choices, list) and any(
        isinstance(choice, dict)
        and (choice.get("finish_reason"), choice.get("stop_reason")) == BACK
        for choice in choices
    )


def _in_whole(raw: bytes) -> PreemptedError | None:
    if raw.find(NEEDLE) < 0:
        return None
    try:
        content = _whole(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    reasons = [(choice.finish_reason, choice.stop_reason) for choice in content.choices]
    begun = begun_in(bytes(content.kv_transfer_params))
    if BACK in reasons or (begun is not None and BACK_FROM_TOOLS in reasons):
        return PreemptedError(begun)
    return None
