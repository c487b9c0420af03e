"""Put the messages of a translated chat into an order that every chat template accepts. Pure.

Dialects allow what many templates refuse: several system messages, system messages between others,
consecutive messages of one role, and messages between a tool call and its result. The templates
want at most one system message, which comes first, then turns of alternating roles, in which each
assistant's message with tool calls is followed directly by the results of these calls. The results
have the order of the calls, since many templates do not show the ids that connect them: agents send
the results of parallel calls in the order in which they ended.

The order of a conversation's beginning does not depend on what follows, except that a late tool
result moves to its call. So the prompt of a turn begins with the prompt of the turn before, and
engines can reuse its KV blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from router.openai.answers import Json

ASSISTANT, SYSTEM, TOOL, USER = "assistant", "system", "tool", "user"
SYSTEM_ROLES = frozenset((SYSTEM, "developer"))
# Stands between the texts of messages that become one message.
SEPARATOR = "\n\n"


@dataclass(slots=True)
class _Turn:
    """Consecutive messages that become one message of `role`, and the results of their calls.
    `calls` has the place of each call by its id."""

    role: str
    messages: list[Json] = field(default_factory=list)
    results: list[Json] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)

    def ordered_results(self) -> list[Json]:
        return sorted(self.results, key=lambda one: self.calls.get(one["tool_call_id"], 0))


def merge_messages(messages: Iterable[Json]) -> list[Json]:
    """Return the messages of a chat in the order that chat templates accept.

    Leading system and developer messages become one system message; later ones become a part of the
    user's message beside them. Consecutive messages of the user or of the assistant become one,
    whose tool calls come last. The results of tools follow the message that has their calls, in the
    order of the calls. The given messages are not changed.
    """
    turns: list[_Turn] = []
    calling: dict[str, _Turn] = {}  # by the id of a tool call
    for message in messages:
        role = message["role"]
        if role == TOOL:
            turn = calling.get(message["tool_call_id"])
            if turn is None:
                turns.append(_Turn(TOOL, [], [message]))
            else:
                turn.results.append(message)
            continue
        if role in SYSTEM_ROLES:
            role = SYSTEM if not turns or turns[-1].role == SYSTEM else USER
        if not turns or turns[-1].role != role or turns[-1].results:
            turns.append(_Turn(role))
        turns[-1].messages.append(message)
        for call in message.get("tool_calls") or ():
            calling[call["id"]] = turns[-1]
            turns[-1].calls.setdefault(call["id"], len(turns[-1].calls))
    return [message for turn in turns for message in (*_merged(turn), *turn.ordered_results())]


def _merged(turn: _Turn) -> list[Json]:
    if not turn.messages:
        return []
    first, role = turn.messages[0], turn.role
    if len(turn.messages) == 1:
        return [first if first["role"] == role else {**first, "role": role}]
    content = _joined([message.get("content") for message in turn.messages])
    merged = {**first, "role": role, "content": content}
    if reasoning := _joined([message.get("reasoning") for message in turn.messages]):
        merged["reasoning"] = reasoning
    if calls := [call for one in turn.messages for call in one.get("tool_calls") or ()]:
        merged.pop("tool_calls", None)  # the calls come last
        merged.update(content=content or None, tool_calls=calls)
    return [merged]


def _joined(contents: Sequence[str | list[Json] | None]) -> str | list[Json]:
    """Join texts to one text; if some contents are lists of parts, return one list of parts."""
    given = [content for content in contents if content]
    texts = [content for content in given if isinstance(content, str)]
    if len(texts) == len(given):
        return SEPARATOR.join(texts)
    parts: list[Json] = []
    for content in given:
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts
