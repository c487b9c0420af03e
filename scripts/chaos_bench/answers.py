"""What a client makes of an answer."""

import json
from dataclasses import dataclass, field
from typing import Any

OK = "ok"
WRONG = "WRONG"
"""Well-formed, and not the answer to this request: the worst."""
EVENT = "error event"
"""A stream that had begun to speak ended with a well-formed error event."""
EARLY_EVENT = "error event at once"
CUT = "cut"
"""It ended in the middle, without a word."""
SHORT = "short"
GARBLED = "garbled"
NO_ANSWER = "no answer"
"""The connection was closed before the first byte."""
REFUSED = "refused"
TIMEOUT = "timeout"


@dataclass(slots=True)
class Ask:
    path: str
    body: bytes
    is_streamed: bool
    expected: str

    @property
    def request(self) -> bytes:
        head = f"POST {self.path} HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\n"
        return f"{head}content-length: {len(self.body)}\r\n\r\n".encode() + self.body


@dataclass(slots=True)
class Received:
    """`status` is None until there is one; `is_complete` says HTTP that all has come."""

    status: int | None = None
    body: bytearray = field(default_factory=bytearray)
    is_complete: bool = False


def judge(ask: Ask, got: Received) -> str:
    if got.status is None:
        return NO_ANSWER
    if got.status != 200:
        return f"status {got.status}"
    return _judge_stream(ask, got) if ask.is_streamed else _judge_whole(ask, got)


def _judge_whole(ask: Ask, got: Received) -> str:
    if not got.is_complete:
        return CUT
    try:
        said = text_in(json.loads(got.body)["choices"][0])
    except (ValueError, KeyError, TypeError, IndexError):
        return GARBLED
    return OK if said == ask.expected else WRONG


def _judge_stream(ask: Ask, got: Received) -> str:
    try:
        said, ending = _read_events(bytes(got.body))
    except (ValueError, KeyError, TypeError, IndexError):
        return GARBLED
    if not ask.expected.startswith(said):
        return WRONG
    if ending == EVENT:
        return EVENT if said else EARLY_EVENT
    if ending != OK or not got.is_complete:
        return CUT
    return OK if said == ask.expected else SHORT


def _read_events(body: bytes) -> tuple[str, str]:
    """What was said, and how it ended: OK with [DONE], EVENT, or CUT.

    Raises ValueError, KeyError, TypeError or IndexError for what is no stream of completions.
    """
    said = ""
    *events, _ = body.split(b"\n\n")
    for event in events:
        if not event.startswith(b"data: "):
            raise ValueError(event)
        data = event.removeprefix(b"data: ")
        if data == b"[DONE]":
            return said, OK
        content = json.loads(data)
        if "error" in content:
            return said, EVENT if isinstance(content["error"]["message"], str) else GARBLED
        said += "".join(text_in(choice) for choice in content["choices"])
    return said, CUT


def text_in(choice: dict[str, Any]) -> str:
    """Token ids where they were asked for: several may look the same as text."""
    if choice.get("token_ids") is not None:
        return "".join(f"{token} " for token in choice["token_ids"])
    message = choice.get("message") or choice.get("delta") or {}
    return str(message.get("content") or "")
