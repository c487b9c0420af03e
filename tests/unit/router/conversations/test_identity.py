"""Which conversation, and whose."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.conversations.conversations import Conversation, ConversationResolver, Header
from router.conversations.entry import prompt_of
from router.openai.answers import AnswerChoice

ORDER = ("conversation_id", "x-conversation-id", "x-session-id", "session_id", "prefix")


def id_of(headers: list[Header], body: dict[str, object]) -> str | None:
    return ConversationResolver(ORDER, "authorization").id_of(headers, body)


@pytest.mark.parametrize(
    ("headers", "body", "found"),
    [
        ([], {}, None),
        ([], {"conversation_id": "a", "session_id": "b"}, "a"),
        ([(b"x-session-id", b"h")], {"session_id": "b"}, "h"),
        ([(b"x-session-id", b"h"), (b"x-conversation-id", b"c")], {}, "c"),
        ([(b"x-conversation-id", b"c")], {"conversation_id": ""}, "c"),
        ([(b"x-conversation-id", b"")], {}, None),
        ([], {"conversation_id": 7}, "7"),
        ([], {"conversation_id": True}, None),
        ([], {"conversation_id": {"id": "x"}}, None),
        ([], {"conversation_id": ["x"]}, None),
        ([(b"session_id", b"h")], {}, None),
        ([], {"prefix": "def f(x):"}, None),
    ],
)
def test_the_first_name_that_is_set_wins(
    headers: list[Header], body: dict[str, object], found: str | None
) -> None:
    assert id_of(headers, body) == found


def key(headers: list[Header], id: str, tenant_header: str = "authorization") -> str | None:
    return ConversationResolver(ORDER, tenant_header).by_id(headers, id).take_key


@given(st.text(), st.text(), st.binary(max_size=20), st.binary(max_size=20))
def test_keys_are_the_same_for_the_same_caller_and_id_only(
    one: str, other: str, secret: bytes, another: bytes
) -> None:
    ours = key([(b"authorization", secret)], one)
    assert (ours == key([(b"authorization", another)], other)) == (
        (one, secret) == (other, another)
    )
    assert (ours == key([], one)) is False


def test_a_key_shows_neither_the_credential_nor_the_id() -> None:
    shown = key([(b"authorization", b"Bearer secret-token")], "session-42") or ""
    assert "secret" not in shown
    assert "session" not in shown
    assert len(shown) == 40


def test_another_header_can_tell_callers_apart() -> None:
    bearer = (b"authorization", b"Bearer one-for-all")
    keys = {key([bearer, (b"x-tenant", name)], "c", "X-Tenant") for name in (b"a", b"b", b"a")}
    assert len(keys) == 2


def recognised(headers: list[Header], *messages: dict[str, str]) -> Conversation:
    prompt = prompt_of({"messages": list(messages)})
    assert prompt is not None
    found = ConversationResolver(("prefix",), "authorization").by_messages(headers, prompt)
    assert found is not None
    return found


ASKED = {"role": "user", "content": "hello"}
SAID = {"role": "assistant", "content": "hi"}
NEXT = {"role": "user", "content": "how are you?"}


def test_a_chat_without_an_id_is_recognised_by_its_messages() -> None:
    first = recognised([], ASKED)
    assert first.take_key is None
    prompt = prompt_of({"messages": [ASKED]})
    assert prompt is not None
    left_at = first.key_after(prompt.with_answer(AnswerChoice(message=SAID)))
    second = recognised([], ASKED, SAID, NEXT)
    assert second.take_key == left_at
    assert second.session != recognised([], NEXT).session
    assert recognised([], ASKED, {**SAID, "content": "no"}, NEXT).take_key != left_at
    assert recognised([(b"authorization", b"x")], ASKED, SAID, NEXT).take_key != left_at


def test_without_the_answer_a_chat_cannot_be_recognised_again() -> None:
    assert recognised([], ASKED).key_after(None) is None
