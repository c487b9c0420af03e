"""Count the tokens of a stream for a key with a limit on tokens.

An event may hold any number of tokens: vLLM's `stream_interval` sets how many. So the router asks
the engine for usage in every event (`continuous_usage_stats`), which counts also the tokens of a
stream that is cut off. The client gets of it what it has asked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import orjson

from router.common.exact_json import dumps, number
from router.http_client.sse import events_in, with_data
from router.openai.answers import Json, choices_of, count_in, parse_object
from router.openai.request_fields import STREAM, STREAM_OPTIONS
from router.telemetry.request_metrics import tokens_in

ASKED = {"include_usage": True, "continuous_usage_stats": True}
USAGE_KEY, NO_CHOICES = b'"usage"', b'"choices":[]'
# The usage at the end of most events; quotes inside of JSON strings are escaped.
USAGE_AT_END = re.compile(rb',"usage":(null|\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})\}\Z')


class StreamedUsage:
    """Counts the tokens of one request's stream, and removes the usage that its client has not
    asked for. `hides_last`: the usage of the whole answer, `hides_others`: that of other events."""

    def __init__(self, hides_last: bool, hides_others: bool, is_several: bool) -> None:
        self._hides_last, self._hides_others = hides_last, hides_others
        self._is_several = is_several
        self._whole: int | None = None
        # By the index of the choice: an event's usage counts that of its own choice.
        self._by_choice: dict[int, int] = {}
        self._num_events = 0

    @classmethod
    def ask(cls, body: Json) -> tuple[StreamedUsage, Json] | None:
        """Return the counter for a request, and the body that asks the engine for usage. None for a
        request that is not streamed."""
        options = body.get(STREAM_OPTIONS)
        if body.get(STREAM) is not True or not isinstance(options, Mapping | None):
            return None
        options = options or {}
        wants = {name: bool(number(options.get(name))) for name in ASKED}
        wants_last = wants["include_usage"]
        wants_others = wants_last and wants["continuous_usage_stats"]
        counter = cls(not wants_last, not wants_others, body.get("n") not in (None, 1))
        return counter, {**body, STREAM_OPTIONS: {**options, **ASKED}}

    @property
    def is_complete(self) -> bool:
        """True if the engine has reported the usage of the whole answer."""
        return self._whole is not None

    @property
    def completion_tokens(self) -> int:
        """Tokens of the answer so far. The events count if the engine has reported no usage."""
        if self._whole is not None:
            return self._whole
        return sum(self._by_choice.values()) if self._by_choice else self._num_events

    def passing(self, block: bytes) -> bytes:
        """Count whole events, and return what the client gets of them."""
        passed, at = b"", 0
        for start, end, data in events_in(block, at_end=True):
            if data is None or not data.lstrip().startswith(b"{"):
                continue
            self._num_events += 1
            kept = data if data.find(USAGE_KEY) < 0 else self._without_usage(data)
            if kept is not data:
                passed += block[at:start]
                at = end
                if kept is not None:
                    passed += with_data(block[start:end], kept)
        return passed + block[at:] if at else block

    def _without_usage(self, data: bytes) -> bytes | None:
        """Count an event's usage. Return what the client gets, None if that is nothing."""
        usual = None if self._is_several else USAGE_AT_END.search(data)
        if usual is not None and data.find(NO_CHOICES) < 0:
            self._note(0, tokens_in(usual[1]).completion)
            hides = self._hides_others if usual[1] != b"null" else self._hides_last
            return data[: usual.start()] + b"}" if hides else data
        content = parse_object(data)
        if content is None or "usage" not in content:
            return data
        usage, choices = content.pop("usage"), choices_of(content)
        count = count_in(usage, "completion_tokens")
        if not choices:
            self._whole = self._whole if count is None else count
            return None if self._hides_last and isinstance(usage, dict) else data
        self._note(choices[0].get("index"), count)
        if not (self._hides_last if usage is None else self._hides_others):
            return data
        try:
            return dumps(content)
        except (
            orjson.JSONEncodeError
        ):  # what can be read but not written: nesting beyond 250 levels
            return data

    def _note(self, index: object, count: int | None) -> None:
        if count is not None:
            place = index if type(index) is int else 0
            self._by_choice[place] = max(count, self._by_choice.get(place, 0))
