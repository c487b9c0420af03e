"""How a greedy stream that no engine can continue is answered once more by another engine.

Stop strings, penalties and grammars depend on all generated tokens, so another engine cannot
continue such an answer from its tokens (`id_resume`). But a greedy answer is the same once more. So
another engine answers the request from its beginning, and what the client has is left out. The
router keeps all that it has sent, and compares: an engine that writes something else ends the
stream with an error. The client waits for as long as the answer took so far.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.common.exact_json import dumps, number
from router.http_client.answer_limits import MemoryBudget
from router.http_client.sse import with_data
from router.openai.answers import Json, choices_of
from router.proxy.internal_fields import events_without_fields
from router.proxy.request import Body
from router.proxy.request_buffer import NotContinuedError, RequestBuffer

# Fields of a choice that are no part of the answer, and those of a tool's call that come once.
NOT_COMPARED = frozenset(("index", "finish_reason", "stop_reason", "id", "type"))
ONCE = ("id", "type")
Path = tuple[str | int, ...]
"""The names and indexes that lead to a value of a choice."""


def may_replay(body: Body) -> bool:
    """Return True if the answer is the same once more: it is the likeliest one, or has a seed."""
    if body.get("n") not in (None, 1) or body.get("echo") or body.get("use_beam_search"):
        return False
    return (
        body.get("seed") is not None
        or body.get("top_k") == 1
        or (number(body.get("temperature")) == 0)
    )


class ReplayBuffer(RequestBuffer):
    """The resume buffer of a stream that another engine answers from its beginning."""

    __slots__ = ("_lengths", "_seen", "_texts")

    def __init__(self, memory: MemoryBudget, max_resumes: int) -> None:
        super().__init__(memory, {}, max_resumes)
        # The client has these texts, in UTF-8, and lists of these lengths.
        self._texts: dict[Path, bytearray] = {}
        self._lengths: dict[Path, int] = {}
        # The current engine has written this much of each.
        self._seen: dict[Path, int] = {}

    @property
    def num_tokens(self) -> int:
        return 0  # they are not counted

    @property
    def is_complete(self) -> bool:
        return bool(self._texts) and not self.is_full and not self.last

    def start_leg(self, inner: Any) -> None:
        super().start_leg(inner)
        self._seen = dict.fromkeys(self._seen, 0)

    def close(self) -> None:
        super().close()
        self._texts, self._lengths = {}, {}

    @property
    def _size(self) -> int:
        return super()._size + sum(map(len, self._texts.values()))

    def passing(self, block: bytes, last: bool) -> bytes:
        if self.is_cut:
            return b""
        block, self.is_cut = self._before_ending(block, last)
        if self.inner is None:
            block = events_without_fields(block)
        if self._is_renaming and block:
            block = self._renamed(block)
        if block:
            block = self._rewritten(block)
        return self._handed_on(block, last)

    @property
    def _is_behind(self) -> bool:
        """True while the engine writes what the client has."""
        return any(
            self._seen[path]
            < (len(self._texts[path]) if path in self._texts else self._lengths[path])
            for path in self._seen
        )

    def _rewrite(self, written: bytes, content: Json) -> bytes:
        """Record an event, and leave out what the client has."""
        was_behind, choices = self._is_behind, choices_of(content)
        is_new = [self._take((at,), choice, was_behind) for at, choice in enumerate(choices)]
        ends = any(choice.get("finish_reason") for choice in choices)
        if ends and self._is_behind:
            raise NotContinuedError
        if not was_behind:
            return written
        return with_data(written, dumps(content)) if any(is_new) or ends or not choices else b""

    def _take(self, path: Path, part: dict[str, Any], is_behind: bool) -> bool:
        """Record a part of a choice, without what the client has. Return True if the rest has
        anything."""
        is_new = False
        for name in [*part]:
            value, where = part[name], (*path, name)
            if name in NOT_COMPARED or value is None:
                continue
            if isinstance(value, str):
                part[name] = rest = self._take_text(where, value)
                is_new = is_new or bool(rest)
            elif isinstance(value, Mapping):
                is_new = self._take(where, part[name], is_behind) or is_new
            elif isinstance(value, list) and name == "tool_calls":
                for call in value:
                    is_new = self._take_call(where, call, is_behind) or is_new
            elif isinstance(value, list):
                part[name] = kept = self._take_items(where, value)
                is_new = is_new or bool(kept)
        return is_new

    def _take_call(self, path: Path, call: Any, is_behind: bool) -> bool:
        if not isinstance(call, dict):
            return False
        where = (*path, str(call.get("index")))
        is_known = where in self._lengths
        self._lengths[where] = self._seen[where] = 0
        if is_behind and is_known:  # the client has its id, and engines make new ones
            for name in ONCE:
                call.pop(name, None)
        return self._take(where, call, is_behind)

    def _take_text(self, path: Path, text: str) -> str:
        written = text.encode(errors="surrogatepass")
        sent, at = self._texts.setdefault(path, bytearray()), self._seen.get(path, 0)
        known = sent[at : at + len(written)]
        self._seen[path] = at + len(written)
        if written[: len(known)] != known:
            raise NotContinuedError
        rest = written[len(known) :]
        if rest and self._reserve(rest):
            sent += rest
        return rest.decode(errors="surrogatepass")

    def _take_items(self, path: Path, items: list[Any]) -> list[Any]:
        sent, at = self._lengths.get(path, 0), self._seen.get(path, 0)
        self._seen[path] = at + len(items)
        self._lengths[path] = max(sent, at + len(items))
        return items[max(0, sent - at) :]
