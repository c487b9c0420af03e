"""The two names of reasoning in the answers of chats (setting reasoning_names).

vLLM sends `reasoning`, SGLang sends `reasoning_content`, and some clients read only one of them. A
client that does not see the reasoning cannot send it back, so the next prompt differs from what the
engines have at the head of the answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from router.proxy.exchange import BodySource, ExchangeWrapper, FilteredStream, Header

BOTH = "both"
KEYS = (b'"reasoning"', b'"reasoning_content"')
# A field whose value is a string. It is never found in the text of a model, since quotes inside
# JSON strings are escaped.
FIELD = re.compile(rb'("reasoning(?:_content)?")(\s*:\s*"[^"\\]*(?:\\.[^"\\]*)*")', re.DOTALL)


def with_both_names(block: bytes) -> bytes:
    """Return JSON text or whole events with each reasoning under both names, unless the engine has
    written both."""
    has = [block.find(key) >= 0 for key in KEYS]
    if has[0] == has[1]:
        return block
    other = KEYS[has[0]]
    return FIELD.sub(lambda field: b"%b,%b%b" % (field[0], other, field[2]), block)


class BothNamesExchange(ExchangeWrapper):
    """An Exchange whose answers have reasoning under both names."""

    async def respond(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        await super().respond(status, headers, with_both_names(body))

    async def relay(
        self, status: int, headers: Sequence[Header], answer: BodySource, idle: float, latest: float
    ) -> None:
        if answer.is_event_stream:
            answer = FilteredStream(answer, with_both_names)
        await super().relay(status, headers, answer, idle, latest)

    async def finish(self, tail: bytes) -> None:
        await super().finish(with_both_names(tail))
