"""The order of messages that chat templates accept."""

import itertools
from copy import deepcopy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from router.openai.message_order import merge_messages

Message = dict[str, Any]
IMAGE = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}


def system(content: Any) -> Message:
    return {"role": "system", "content": content}


def developer(content: Any) -> Message:
    return {"role": "developer", "content": content}


def user(content: Any) -> Message:
    return {"role": "user", "content": content}


def assistant(content: Any, *calls: str, **fields: Any) -> Message:
    message = {"role": "assistant", "content": content, **fields}
    return {**message, "tool_calls": [call(name) for name in calls]} if calls else message


def call(name: str) -> Message:
    return {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}}


def result(name: str) -> Message:
    return {"role": "tool", "tool_call_id": name, "content": f"result of {name}"}


def test_messages_in_order_are_unchanged() -> None:
    chat = [system("s"), user("u"), assistant(None, "a", "b"), result("a"), result("b"), user("v")]
    assert merge_messages(chat) == chat


def test_leading_system_and_developer_messages_become_one_system_message() -> None:
    chat = [system("one"), developer("two"), system([IMAGE]), user("u")]
    content = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}, IMAGE]
    assert merge_messages(chat) == [system(content), user("u")]
    assert merge_messages([developer("two"), user("u")]) == [system("two"), user("u")]
    assert merge_messages([system("one"), developer("two")]) == [system("one\n\ntwo")]


def test_later_system_messages_are_folded_into_the_users_message_beside_them() -> None:
    chat = [user("u"), system("s"), assistant("a"), developer("d"), user("v")]
    assert merge_messages(chat) == [user("u\n\ns"), assistant("a"), user("d\n\nv")]
    assert merge_messages([user([IMAGE]), system("s")]) == [
        user([IMAGE, {"type": "text", "text": "s"}])
    ]


def test_a_system_message_without_a_user_beside_it_becomes_the_users() -> None:
    chat = [user("u"), assistant("a"), system("s"), assistant("b")]
    assert merge_messages(chat) == [user("u"), assistant("a"), user("s"), assistant("b")]


def test_results_follow_their_calls_directly() -> None:
    called = assistant(None, "a", "b")
    chat = [user("u"), called, system("s"), result("a"), user("v"), result("b"), assistant("x")]
    assert merge_messages(chat) == [
        user("u"), called, result("a"), result("b"), user("s\n\nv"), assistant("x")
    ]  # fmt: skip


def test_results_have_the_order_of_their_calls() -> None:
    calls = [user("u"), assistant(None, "a"), assistant(None, "b", "c")]
    merged = merge_messages([*calls, result("c"), result("b"), result("a"), result("b")])
    assert merged[1:] == [
        assistant(None, "a", "b", "c"),
        result("a"),
        result("b"),
        result("b"),
        result("c"),
    ]


def test_a_result_belongs_to_the_latest_call_with_its_id() -> None:
    chat = [assistant(None, "a"), result("a"), assistant(None, "a"), result("a")]
    assert merge_messages(chat) == chat


def test_a_result_without_a_call_stays_where_it_is() -> None:
    chat = [user("u"), result("z"), user("v")]
    assert merge_messages(chat) == chat


def test_consecutive_messages_of_the_assistant_become_one_with_its_calls_last() -> None:
    chat = [
        assistant(None, reasoning="hm"), assistant(None, "a"), assistant("text"),
        assistant("", "b", reasoning="so"), result("a"), result("b"), assistant("end"),
    ]  # fmt: skip
    merged = merge_messages(chat)
    assert merged == [
        assistant("text", "a", "b", reasoning="hm\n\nso"), result("a"), result("b"),
        assistant("end"),
    ]  # fmt: skip
    assert list(merged[0])[-1] == "tool_calls"
    assert merge_messages([assistant(None, "a"), assistant("", "b")]) == [assistant(None, "a", "b")]


CONTENTS = st.none() | st.text(max_size=3) | st.just([IMAGE])
NAMES = st.sampled_from("abc")
MESSAGES = st.lists(
    st.builds(user, CONTENTS)
    | st.builds(system, CONTENTS)
    | st.builds(developer, CONTENTS)
    | st.builds(assistant, CONTENTS)
    | st.builds(assistant, CONTENTS, NAMES)
    | st.builds(result, NAMES),
    max_size=12,
)


@given(MESSAGES)
def test_templates_accept_any_order(messages: list[Message]) -> None:
    given_messages = deepcopy(messages)
    merged = merge_messages(messages)
    assert messages == given_messages  # unchanged
    assert merge_messages(merged) == merged
    roles = [message["role"] for message in merged]
    assert "system" not in roles[1:]
    assert "developer" not in roles
    for before, after in itertools.pairwise(roles):
        assert before == "tool" or before != after
    results = [message for message in messages if message["role"] == "tool"]
    key = str
    assert sorted((m for m in merged if m["role"] == "tool"), key=key) == sorted(results, key=key)


@given(MESSAGES.filter(lambda given: not given or given[-1]["role"] != "tool"), st.text())
def test_a_turns_prompt_begins_with_the_prompt_before(messages: list[Message], text: str) -> None:
    before = merge_messages([*messages, user("u")])
    after = merge_messages([*messages, user("u"), assistant("a"), user(text)])
    assert after[: len(before)] == before
