"""The prefix guard: what of the last turn's KV is surely the next prompt's."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from router.conversations.conversations import Conversations
from router.conversations.entry import (
    UNSAFE_TAIL_TOKENS,
    Entry,
    ReuseMatch,
    decide_reuse,
    find_answer_change,
    prompt_of,
)
from router.conversations.reuse import truncate_params
from router.conversations.store import MemoryStore
from router.openai.answers import AnswerChoice, read_choice, read_streamed_choice

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
SYSTEM = {"role": "system", "content": "Be brief."}
FIRST = {"role": "user", "content": "What is a block?"}
ANSWER = {"role": "assistant", "content": "Sixteen tokens of KV."}
SECOND = {"role": "user", "content": "And a lease?"}
CALL = {
    "id": "call-1",
    "type": "function",
    "function": {"name": "look_up", "arguments": '{"word": "lease"}'},
}
PARAMS = {
    "remote_engine_id": "d-1",
    "remote_block_ids": [list(range(40))],
    "remote_num_tokens": 633,
}


def body_of_chat(*messages: object, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages), **fields}


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Desk:
    """Conversations over a memory store: one turn after the other."""

    def __init__(self, *names: str) -> None:
        self.clock = Clock()
        names = names or ("conversation_id",)
        self.conversations = Conversations(
            MemoryStore(100, 10**6), names, "authorization", ttl=450, clock=self.clock
        )

    async def leave(
        self,
        body: dict[str, Any],
        answer: AnswerChoice | None,
        tokens: int | None = 600,
        **params: Any,
    ) -> None:
        turn = self.conversations.turn_of((), {"conversation_id": "c", **body})
        assert turn is not None
        await self.conversations.recall(turn)
        kept = await self.conversations.keep(turn, "d:1", {**PARAMS, **params}, answer, tokens)
        assert kept.is_kept

    async def entry(self, body: dict[str, Any]) -> Entry | None:
        turn = self.conversations.turn_of((), {"conversation_id": "c", **body})
        assert turn is not None
        await self.conversations.recall(turn)
        return turn.entry


def answered(**message: Any) -> AnswerChoice:
    answer = read_choice({"choices": [{"message": {"role": "assistant", **message}}]})
    assert answer is not None
    return answer


async def left(
    answer: AnswerChoice | None = None, body: dict[str, Any] | None = None, tokens: int | None = 600
) -> Entry:
    desk = Desk()
    first = body or body_of_chat(SYSTEM, FIRST)
    await desk.leave(first, answer or answered(content=ANSWER["content"]), tokens)
    entry = await desk.entry(first)
    assert entry is not None
    return entry


def verdict(entry: Entry, body: dict[str, Any]) -> tuple[str, str, int]:
    prompt = prompt_of(body)
    assert prompt is not None
    found = decide_reuse(entry, prompt)
    return found.match.value, found.reason, found.tokens


SAFE = 600 - UNSAFE_TAIL_TOKENS


async def test_a_turn_that_extends_the_last_one_reuses_all_of_it() -> None:
    assert verdict(await left(), body_of_chat(SYSTEM, FIRST, ANSWER, SECOND))[:2] == ("hit", "")


async def test_a_cache_mark_that_moves_with_the_last_message_changes_nothing() -> None:
    def marked(message: dict[str, Any]) -> dict[str, Any]:
        mark = {"cache_control": {"type": "ephemeral"}}
        part = {"type": "text", "text": message["content"], **mark}
        return {"role": message["role"], "content": [part]}

    entry = await left(body=body_of_chat({**SYSTEM, "cache_control": {}}, marked(FIRST)))
    assert verdict(entry, body_of_chat(SYSTEM, FIRST, ANSWER, marked(SECOND)))[0] == "hit"


@pytest.mark.parametrize(
    "answer",
    [
        {**ANSWER, "refusal": None, "tool_calls": [], "audio": None, "annotations": None},
        {"role": "assistant", "content": [{"type": "text", "text": ANSWER["content"]}]},
    ],
)
async def test_an_answer_may_be_repeated_as_any_client_does(answer: dict[str, Any]) -> None:
    assert verdict(await left(), body_of_chat(SYSTEM, FIRST, answer, SECOND))[0] == "hit"


@pytest.mark.parametrize(
    ("written", "repeated", "expected"),
    [
        ('{"word": "lease"}', '{"word":"lease"}', "rendering"),
        ('{"a": 1, "b": [2.0, 1e1]}', '{"b":[2,10],"a":1}', "rendering"),
        ("", "{}", "rendering"),
        ('{"a": 1.5}', {"a": 1.5}, "rendering"),
        ("not JSON", "not JSON", "rendering"),
        ("[" * 999, "[" * 999, "rendering"),
        ('{"a": 1e999}', '{"a": 1e999}', "rendering"),
        ('{"a": ' + "9" * 5000 + "}", '{"a": ' + "9" * 5000 + "}", "rendering"),
        ('{"a": "1"}', '{"a": 1}', "history"),
        ('{"a": [1, 2]}', '{"a": [2, 1]}', "history"),
        ('{"a": 1e999}', '{"a": null}', "history"),
        ("not JSON", "not  JSON", "history"),
    ],
)
async def test_arguments_of_a_tool_call_are_compared_by_value(
    written: object, repeated: object, expected: str
) -> None:
    def calling(arguments: object) -> dict[str, Any]:
        return {"tool_calls": [{**CALL, "function": {"name": "look_up", "arguments": arguments}}]}

    result = {"role": "tool", "tool_call_id": "call-1", "content": "A promise."}
    after = body_of_chat(SYSTEM, FIRST, {"role": "assistant", **calling(repeated)}, result)
    assert verdict(await left(answered(**calling(written))), after) == ("cut", expected, SAFE)


CUT, LOST = ("cut", "history", SAFE), ("mismatch", "history", 0)
CHANGED: dict[str, tuple[dict[str, Any], tuple[str, str, int]]] = {
    "answer edited": (body_of_chat(SYSTEM, FIRST, {**ANSWER, "content": "32"}, SECOND), CUT),
    "answer gone": (body_of_chat(SYSTEM, FIRST, SECOND), CUT),
    "regenerated": (body_of_chat(SYSTEM, FIRST), CUT),
    "question edited": (body_of_chat(SYSTEM, {**FIRST, "content": "?"}, ANSWER, SECOND), LOST),
    "system edited": (body_of_chat({**SYSTEM, "content": "?"}, FIRST, ANSWER, SECOND), LOST),
    "role changed": (body_of_chat({**SYSTEM, "role": "developer"}, FIRST, ANSWER, SECOND), LOST),
    "truncated": (body_of_chat(FIRST, ANSWER, SECOND), LOST),
    "tool call added": (
        body_of_chat(SYSTEM, FIRST, {**ANSWER, "tool_calls": [CALL]}, SECOND),
        CUT,
    ),
    "model": (body_of_chat(SYSTEM, FIRST, ANSWER, SECOND, model="n"), ("mismatch", "model", 0)),
    "salt": (body_of_chat(SYSTEM, FIRST, ANSWER, SECOND, cache_salt="s"), ("mismatch", "model", 0)),
    "tools": (
        body_of_chat(SYSTEM, FIRST, ANSWER, SECOND, tools=[{"type": "function"}]),
        ("mismatch", "tools", 0),
    ),
    "template": (
        body_of_chat(SYSTEM, FIRST, ANSWER, SECOND, chat_template_kwargs={"date": "today"}),
        ("mismatch", "template", 0),
    ),
    "another endpoint": ({"model": "m", "prompt": "Be brief."}, LOST),
}


@pytest.mark.parametrize("change", CHANGED)
async def test_what_does_not_extend_the_last_turn_is_cut_back_or_not_reused(change: str) -> None:
    body, expected = CHANGED[change]
    assert verdict(await left(), body) == expected


async def test_without_the_prompts_length_there_is_no_cut() -> None:
    assert verdict(await left(tokens=None), body_of_chat(SYSTEM, FIRST, SECOND)) == (
        "mismatch",
        "history",
        0,
    )


@pytest.mark.parametrize(
    "answer",
    [
        {"content": ANSWER["content"], "reasoning": "Hm."},
        {"content": ANSWER["content"], "reasoning_content": "Hm."},
        {"content": "<think>Hm.</think>" + str(ANSWER["content"])},
    ],
)
@pytest.mark.parametrize("stripped", [True, False])
async def test_what_was_reasoned_is_never_reused(answer: dict[str, Any], stripped: bool) -> None:
    repeated = ANSWER if stripped else {"role": "assistant", **answer}
    fit, reason, tokens = verdict(
        await left(answered(**answer)), body_of_chat(SYSTEM, FIRST, repeated, SECOND)
    )
    assert (fit, tokens) == ("cut", SAFE)
    assert reason == "reasoning" or "<think>" in str(answer["content"])


REASONED, TEXT = {"reasoning": "Hm."}, str(ANSWER["content"])


@pytest.mark.parametrize(
    ("written", "repeated", "change"),
    [
        # LiteLLM, of a stream and of a whole answer, mistral-vibe, and inspect-ai.
        (REASONED, {"reasoning_content": "Hm."}, ""),
        (REASONED, {"reasoning_content": "Hm.", "provider_specific_fields": REASONED}, ""),
        (REASONED, {}, "reasoning_missing"),
        (REASONED, {**REASONED, "content": "\n" + TEXT}, "line_break"),
        ({"reasoning_content": "Hm."}, {"reasoning": "Hm.", "reasoning_content": "no"}, ""),
        (REASONED, {"reasoning": "Hm?"}, "reasoning_changed"),
        (REASONED, {"reasoning": [[]] * 9}, "reasoning_missing"),
        ({}, {"content": f"\n\n {TEXT}"}, "line_break"),
        ({"content": f"\n{TEXT}"}, {"content": f"\n\n{TEXT}"}, "line_break"),
        ({}, {"content": f"\nNot {TEXT}"}, ""),
        ({}, {"content": [{"type": "text", "text": TEXT}]}, ""),
        ({}, {"reasoning": "of a client's own"}, ""),
    ],
)
async def test_what_a_client_changes_at_the_head_of_an_answer_is_named(
    written: dict[str, Any], repeated: dict[str, Any], change: str
) -> None:
    entry = await left(answered(**{"content": TEXT, **written}))
    prompt = prompt_of(body_of_chat(SYSTEM, FIRST, {**ANSWER, **repeated}, SECOND))
    assert prompt is not None
    assert Entry.from_bytes(entry.to_bytes()) == entry
    assert find_answer_change(entry, prompt) == change


async def test_reasoning_that_a_client_adds_to_the_history_ends_what_is_safe() -> None:
    changed = {**ANSWER, "reasoning_content": "Hm."}
    assert verdict(await left(), body_of_chat(SYSTEM, FIRST, changed, SECOND)) == (
        "cut",
        "reasoning",
        SAFE,
    )


@pytest.mark.parametrize("answer", [{"content": "Yes.\n"}, {"content": None, "tool_calls": [CALL]}])
async def test_what_a_template_renders_in_its_own_way_is_not_reused(answer: dict[str, Any]) -> None:
    body = body_of_chat(SYSTEM, FIRST, {"role": "assistant", **answer}, SECOND)
    assert verdict(await left(answered(**answer)), body) == ("cut", "rendering", SAFE)


async def test_a_thinking_switch_makes_the_answer_inexact() -> None:
    body = body_of_chat(SYSTEM, FIRST, chat_template_kwargs={"enable_thinking": False})
    after = {**body, "messages": [SYSTEM, FIRST, ANSWER, SECOND]}
    assert verdict(await left(body=body), after) == ("cut", "reasoning", SAFE)


async def test_a_later_edit_is_cut_back_to_an_earlier_turn() -> None:
    desk = Desk()
    await desk.leave(body_of_chat(SYSTEM, FIRST), answered(content=ANSWER["content"]), 600)
    await desk.leave(
        body_of_chat(SYSTEM, FIRST, ANSWER, SECOND), answered(content="Thirty seconds."), 900
    )
    entry = await desk.entry(body_of_chat(SYSTEM, FIRST))
    assert entry is not None
    edited = body_of_chat(SYSTEM, FIRST, {**ANSWER, "content": "No."}, SECOND)
    assert verdict(entry, edited) == ("cut", "history", SAFE)
    shorter = body_of_chat(SYSTEM, FIRST, ANSWER, SECOND, {"role": "user", "content": "?"})
    assert verdict(entry, shorter) == ("cut", "history", 900 - UNSAFE_TAIL_TOKENS)


@pytest.mark.parametrize(
    ("prompt", "answer", "after", "fit"),
    [
        ("abc", {"text": "def"}, "abcdefg", "hit"),
        ("abc", {"text": "def"}, "abcdeXg", "cut"),
        ("abc", {"text": "def"}, "aXcdefg", "mismatch"),
        ("abc", {"text": "def"}, "ab", "mismatch"),
        ([1, 2], {"text": "x", "token_ids": [3, 4]}, [1, 2, 3, 4, 5], "hit"),
        ([1, 2], {"text": "x", "token_ids": [3, 4]}, [1, 2, 3, 5, 5], "cut"),
        ([1, 2], {"text": "x"}, [1, 2, 3, 4, 5], "cut"),
        (["abc"], {"text": "def"}, "abcdefg", "hit"),
    ],
)
async def test_completions_are_compared_by_characters_and_by_ids(
    prompt: object, answer: dict[str, Any], after: object, fit: str
) -> None:
    body = {"model": "m", "prompt": prompt}
    entry = await left(read_choice({"choices": [answer]}), body)
    assert verdict(entry, {**body, "prompt": after})[0] == fit


MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool"]), "content": st.text(max_size=3)}
    ),
    max_size=5,
)


@given(MESSAGES, MESSAGES, st.text(max_size=3))
async def test_a_hit_is_an_extension_and_a_cut_a_common_beginning(
    before: list[Any], after: list[Any], answer: str
) -> None:
    entry = await left(answered(content=answer), body_of_chat(*before))
    fit, _, _ = verdict(entry, body_of_chat(*after))
    extended = [*before, {"role": "assistant", "content": answer}]
    if fit == ReuseMatch.HIT:
        assert after[: len(extended)] == extended
    if fit == ReuseMatch.CUT:
        assert after[: len(before)] == before


@given(JSON_VALUES, JSON_VALUES, JSON_VALUES)
def test_any_json_is_a_prompt_or_none_and_an_answer_or_none(
    messages: object, prompt: object, choices: object
) -> None:
    for body in ({"messages": messages}, {"prompt": prompt}, {"messages": [messages]}):
        found = prompt_of(body)
        assert found is None or found.digest_at(found.count) is not None
        assert found is None or found.digest_at(found.count + 1) is None
    read_choice({"choices": choices})
    read_choice({"choices": [choices]})
    assert prompt_of({"model": messages, "tools": prompt, "messages": []}) is not None


async def test_an_entry_survives_its_store_bit_for_bit() -> None:
    entry = replace(await left(), params={**PARAMS, "nested": {"é": [1.5, None]}})
    assert Entry.from_bytes(entry.to_bytes()) == entry


@given(st.integers(1, 5000), st.integers(0, 6000), st.sampled_from([8, 16, 32, 64, 128]))
def test_a_cut_keeps_whole_blocks_within_the_safe_tokens(held: int, safe: int, size: int) -> None:
    blocks = list(range(-(-held // size)))
    params = {"remote_block_ids": [blocks], "remote_num_tokens": held, "other": 1}
    found = truncate_params(params, safe)
    if found is None:
        return
    kept = found["remote_block_ids"][0]
    assert kept == blocks[: len(kept)]
    assert found["remote_num_tokens"] == len(kept) * size
    assert 0 < found["remote_num_tokens"] <= min(safe, held)
    assert found["other"] == 1


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"remote_block_ids": [[1], [2]], "remote_num_tokens": 10},
        {"remote_block_ids": [1, 2], "remote_num_tokens": 20},
        {"remote_block_ids": [[1, 2]], "remote_num_tokens": None},
        {"remote_block_ids": [[1]], "remote_num_tokens": 10},
        {"remote_block_ids": None, "remote_num_tokens": 10},
    ],
)
def test_blocks_that_cannot_be_told_apart_are_not_cut(params: dict[str, Any]) -> None:
    assert truncate_params(params, 1000) is None


async def test_an_entry_is_valid_for_less_than_the_decoder_keeps_its_blocks() -> None:
    for retained, valid in ((None, 450), (160.0, 150), (100_000.0, 450)):
        desk = Desk()
        until = None if retained is None else desk.clock.now + retained
        await desk.leave(body_of_chat(FIRST), answered(content="x"), retained_until=until)
        desk.clock.now += valid - 1
        entry = await desk.entry(body_of_chat(FIRST))
        assert entry is not None
        desk = Desk()
        await desk.leave(body_of_chat(FIRST), answered(content="x"), retained_until=until)
        desk.clock.now += valid
        turn = desk.conversations.turn_of((), {"conversation_id": "c", **body_of_chat(FIRST)})
        assert turn is not None
        await desk.conversations.recall(turn)
        assert (turn.entry, turn.recalled.value) == (None, "expired")


@pytest.mark.parametrize(
    ("before", "after"), [({"a": 1}, "text"), ([], "text"), (3, "text"), ("te", "xt")]
)
def test_what_was_no_text_is_none(before: object, after: str) -> None:
    """A strange engine's: whatever it streams, what it said is read or is nothing."""
    calls = [[{"index": 0, "function": {"name": name}}] for name in (before, after)]
    deltas = [
        {"content": before, "tool_calls": calls[0]},
        {"content": after, "tool_calls": calls[1]},
    ]
    said = read_streamed_choice([{"choices": [{"index": 0, "delta": delta}]} for delta in deltas])
    assert said is not None
    assert said.message is not None
    assert said.message["content"] == "text"
    assert said.message["tool_calls"][0]["function"]["name"] == "text"
