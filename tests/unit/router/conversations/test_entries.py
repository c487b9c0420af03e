"""What comes back from a store is input: an entry with every type right, or none."""

import math
from copy import deepcopy
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.conversations.conversations import Conversations, RecallOutcome, Turn
from router.conversations.entry import Entry, PromptPrefix, ReuseScope, decide_reuse, prompt_of
from router.conversations.reuse import truncate_params
from router.conversations.store import MemoryStore, StoreError
from router.openai.answers import AnswerChoice, read_choice
from tests.unit.router.conversations.store_wrapper import StoreWrapper

NOW = 1000.0
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
PARAMS = st.fixed_dictionaries(
    {"remote_engine_id": st.text(max_size=5) | VALUES, "remote_block_ids": VALUES},
    optional={"retained_until": VALUES, "prefix_proof": VALUES, "remote_num_tokens": VALUES},
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant"]), "content": st.text(max_size=5)},
    optional={"reasoning": st.text(max_size=3), "tool_calls": VALUES},
)
BODIES = st.fixed_dictionaries(
    {"model": VALUES, "messages": st.lists(MESSAGE, max_size=4)},
    optional={"tools": VALUES, "chat_template_kwargs": VALUES},
) | st.fixed_dictionaries(
    {"model": VALUES, "prompt": st.text(max_size=9) | st.lists(st.integers(0, 9), max_size=9)}
)
ANSWERS = st.none() | st.builds(
    lambda message, text: read_choice({"choices": [{"message": message, "text": text}]}),
    st.none() | MESSAGE,
    st.text(max_size=5),
)
ODD = st.sampled_from([1e308, -1e308, -1, 2**63, 2**64 - 1, "x" * 999, [[]] * 99])
TOKENS = st.none() | st.integers(-(2**63), 2**64 - 1)


class Open(StoreWrapper):
    """Shows what was put there last; empty: nothing."""

    last = b""

    async def put(self, key: str, value: bytes, seconds: float) -> list[bytes]:
        self.last = value
        return await super().put(key, value, seconds)


def turn_of(conversations: Conversations, body: dict[str, Any]) -> Turn:
    turn = conversations.turn_of((), {"conversation_id": "c", **body})
    assert turn is not None
    return turn


async def written(body: dict[str, Any], params: dict[str, Any], said: Any, tokens: Any) -> bytes:
    """What two turns of a conversation leave, as it lies in the store; empty if they left none."""
    shelf = Open(MemoryStore(9, 10**6))
    conversations = Conversations(shelf, ["conversation_id"], "authorization", 450, lambda: NOW)
    for _ in range(2):
        turn = turn_of(conversations, body)
        await conversations.recall(turn)
        assert turn.recalled in (RecallOutcome.NEW, RecallOutcome.ENTRY), (
            "what a turn leaves can be read"
        )
        await conversations.keep(turn, "d:1", params, said, tokens)
    return shelf.last


async def test_a_store_that_fails_once_hides_no_turn_for_ever() -> None:
    class Failing(StoreWrapper):
        fails = False

        async def take(self, key: str) -> bytes | None:
            if self.fails:
                raise StoreError("no answer")
            return await super().take(key)

    store = Failing(MemoryStore(9, 10**6))
    conversations = Conversations(store, ["conversation_id"], "authorization", 450, lambda: NOW)
    first = {"model": "m", "messages": [{"role": "user", "content": "1"}]}
    turn = turn_of(conversations, first)
    said = AnswerChoice(message={"role": "assistant", "content": "2"}, prompt_tokens=500)
    await conversations.keep(turn, "d:1", {"remote_block_ids": [[1]]}, said, 500)
    recalled = []
    for store.fails in (True, False):
        turn = turn_of(conversations, first)  # asked again: the answer is generated anew
        await conversations.recall(turn)
        recalled.append(turn.recalled)
    assert recalled == [RecallOutcome.STORE_FAILED, RecallOutcome.ENTRY]


@given(BODIES, PARAMS, ANSWERS, TOKENS)
async def test_what_a_turn_leaves_survives_its_store_bit_for_bit(
    body: dict[str, Any], params: dict[str, Any], said: Any, tokens: Any
) -> None:
    raw = await written(body, params, said, tokens)
    if not raw:  # no time left
        return
    entry = Entry.from_bytes(raw)
    assert entry is not None
    assert entry.to_bytes() == raw
    assert entry.params == orjson.loads(orjson.dumps(params))


def places(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of every value in there, but not inside of the params, which are any JSON."""
    inner = content.items() if isinstance(content, dict) else enumerate(content)
    found = []
    for name, value in inner:
        found.append((*path, name))
        if isinstance(value, dict | list) and name != "params":
            found += places(value, (*path, name))
    return found


@st.composite
def tampered(draw: st.DrawFn, content: Any) -> bytes:
    """A real entry in which one to three values are others, lists, lost or added."""
    for _ in range(draw(st.integers(1, 3))):
        *path, last = draw(st.sampled_from(places(content)))
        holder = content
        for name in path:
            holder = holder[name]
        change = draw(st.sampled_from(["another", "wrapped", "lost", "added"]))
        if change == "another":
            holder[last] = deepcopy(draw(VALUES | ODD))  # the next change may be within
        elif change == "wrapped":
            holder[last] = [holder[last]]
        elif change == "lost":
            del holder[last]
        else:
            content[draw(st.text(max_size=5))] = deepcopy(draw(VALUES))
    return orjson.dumps(content)


@given(st.data(), BODIES, PARAMS, ANSWERS, st.none() | st.integers(0, 2000), BODIES)
async def test_a_real_entry_that_was_changed_is_one_with_all_types_right_or_none(
    data: st.DataObject,
    body: dict[str, Any],
    params: dict[str, Any],
    said: Any,
    tokens: Any,
    after: dict[str, Any],
) -> None:
    raw = await written(body, {**params, "retained_until": None}, said, tokens)
    entry = Entry.from_bytes(data.draw(tampered(orjson.loads(raw))))
    if entry is None:
        return
    assert_typed(entry)
    prompt = prompt_of(after)
    assert prompt is not None
    verdict = decide_reuse(entry, prompt)
    truncate_params(entry.params, verdict.tokens)
    assert Entry.from_bytes(entry.to_bytes()) == entry


def assert_typed(entry: Entry) -> None:
    """By hand, so that it is not the code's own opinion."""
    assert type(entry.decoder) is str
    assert type(entry.params) is dict
    assert type(entry.kind) is str
    assert entry.inexact in ("", "reasoning", "rendering")
    for time in (entry.created_at, entry.expires_at):
        assert type(time) is float
        assert math.isfinite(time)
        assert time >= 0
    assert type(entry.size) is int
    assert type(entry.scope) is ReuseScope
    assert all(type(getattr(entry.scope, name)) is str for name in ReuseScope.__struct_fields__)
    assert type(entry.prompts) is tuple
    assert len(entry.prompts) <= 16
    for mark in (*entry.prompts, *([] if entry.whole is None else [entry.whole])):
        assert type(mark) is PromptPrefix
        assert type(mark.count) is int
        assert mark.count >= 0
        assert type(mark.digest) is str
        assert mark.tokens is None or (type(mark.tokens) is int and mark.tokens >= 0)


@given(st.data(), BODIES, PARAMS)
async def test_a_real_entry_whose_bytes_were_changed_is_one_or_none(
    data: st.DataObject, body: dict[str, Any], params: dict[str, Any]
) -> None:
    raw = bytearray(await written(body, {**params, "retained_until": None}, None, 5))
    changes = st.lists(st.tuples(st.integers(0, len(raw) - 1), st.integers(0, 255)), max_size=4)
    for at, byte in data.draw(changes):
        raw[at] = byte
    entry = Entry.from_bytes(bytes(raw[: data.draw(st.integers(0, len(raw)))]))
    if entry is not None:
        assert_typed(entry)


async def usual() -> dict[str, Any]:
    body, params = {"model": "m", "prompt": "abc"}, {"remote_host": "h"}
    raw = await written(body, params, read_choice({"choices": [{"text": "d"}]}), 3)
    content: dict[str, Any] = orjson.loads(raw)
    return content


async def entry_with(**changes: Any) -> Entry | None:
    return Entry.from_bytes(orjson.dumps({**await usual(), **changes}))


async def test_an_entry_says_its_version_and_each_of_its_fields() -> None:
    content = await usual()
    assert Entry.from_bytes(orjson.dumps(content)) is not None
    for name in content:
        rest = {known: value for known, value in content.items() if known != name}
        assert Entry.from_bytes(orjson.dumps(rest)) is None, name
    for version in (0, 2, "1", True, None, 1.5):
        assert Entry.from_bytes(orjson.dumps(content | {"v": version})) is None, version


MARK = {"count": 1, "digest": "a", "tokens": 1}


@pytest.mark.parametrize(
    "changes",
    [
        {"v": 2},
        {"v": "1"},
        {"v": None},
        {"decoder": 1},
        {"decoder": None},
        {"decoder": "d" * 1000},
        {"params": None},
        {"params": []},
        {"params": "{}"},
        {"created_at": "1000"},
        {"created_at": None},
        {"created_at": True},
        {"expires_at": "2000"},
        {"expires_at": 1e300},
        {"expires_at": -1},
        {"kind": 1},
        {"scope": None},
        {"scope": {"model": 1, "tools": "", "template": ""}},
        {"scope": {"model": "", "tools": ""}},
        {"scope": {"model": "m" * 99, "tools": "", "template": ""}},
        {"prompts": None},
        {"prompts": [1]},
        {"prompts": [{**MARK, "tokens": "600"}]},
        {"prompts": [{**MARK, "tokens": 1.5}]},
        {"prompts": [{**MARK, "tokens": -1}]},
        {"prompts": [{**MARK, "count": None}]},
        {"prompts": [{**MARK, "count": True}]},
        {"prompts": [{**MARK, "count": 2**60}]},
        {"prompts": [{**MARK, "digest": 1}]},
        {"prompts": [MARK] * 17},
        {"whole": []},
        {"whole": {"count": 1}},
        {"inexact": None},
        {"inexact": "another reason"},
        {"size": "1"},
        {"size": -1},
        {"size": 1e300},
        {"another": 1},
    ],
)
async def test_a_wrong_type_anywhere_is_no_entry(changes: dict[str, Any]) -> None:
    assert await entry_with() is not None
    assert await entry_with(**changes) is None


@pytest.mark.parametrize(
    "raw",
    [b"", b"\xff", b"null", b"1", b"[]", b"{}", b"NaN", b'{"v":1}', b"[" * 9999, b'{"v":1e999}'],
)
def test_anything_else_is_no_entry(raw: bytes) -> None:
    assert Entry.from_bytes(raw) is None


async def test_params_that_could_not_be_told_to_an_engine_are_not_kept() -> None:
    deep: dict[str, Any] = {"remote_host": "h"}
    for _ in range(400):
        deep = {"remote_host": deep}
    assert await written({"model": "m", "prompt": "abc"}, deep, None, 3) == b""
