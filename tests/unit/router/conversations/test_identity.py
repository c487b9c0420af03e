"""Which conversation, and whose."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.conversations.conversations import Conversations, Header, RecallOutcome, Turn
from router.conversations.store import MemoryStore
from router.openai.answers import AnswerChoice

ORDER = (
    "conversation_id",
    "x-conversation-id",
    "x-session-id",
    "session_id",
    "thread-id",
    "header:talk",
    "prefix",
)


def key_of(
    headers: list[Header], body: dict[str, object], tenant_header: str = "authorization"
) -> str | None:
    """Return the key of a completion's entry."""
    conversations = Conversations(MemoryStore(9, 10**6), ORDER, tenant_header, 450)
    turn = conversations.turn_of(headers, {"prompt": "x", **body})
    return None if turn is None else turn.take_key


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
        ([(b"thread-id", b"t")], {}, "t"),
        ([(b"talk", b"t")], {}, "t"),
        ([], {"thread-id": "t"}, "t"),
        ([(b"thread-id", b"t")], {"thread-id": "f"}, "t"),
        ([], {"x-session-id": "t", "talk": "t", "header:talk": "t"}, None),
        ([], {"prefix": "def f(x):"}, None),
    ],
)
def test_the_first_name_that_is_set_wins(
    headers: list[Header], body: dict[str, object], found: str | None
) -> None:
    expected = None if found is None else key_of([], {"conversation_id": found})
    assert key_of(headers, body) == expected


def key(headers: list[Header], id: str, tenant_header: str = "authorization") -> str | None:
    return key_of(headers, {"conversation_id": id}, tenant_header)


@given(st.text(min_size=1), st.text(min_size=1), st.binary(max_size=20), st.binary(max_size=20))
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


ASKED = {"role": "user", "content": "hello"}
SAID = {"role": "assistant", "content": "hi"}
NEXT = {"role": "user", "content": "how are you?"}
PARAMS = {"remote_host": "h"}


class Chats:
    """Conversations that are recognised by their messages."""

    def __init__(self) -> None:
        self.conversations = Conversations(MemoryStore(9, 10**6), ("prefix",), "authorization", 450)

    def turn(self, *messages: dict[str, Any], headers: tuple[Header, ...] = ()) -> Turn:
        turn = self.conversations.turn_of(headers, {"messages": list(messages)})
        assert turn is not None
        return turn

    async def finds_entry(
        self, *messages: dict[str, Any], headers: tuple[Header, ...] = ()
    ) -> bool:
        turn = self.turn(*messages, headers=headers)
        await self.conversations.recall(turn)
        return turn.entry is not None


async def test_a_chat_without_an_id_is_recognised_by_its_messages() -> None:
    chats = Chats()
    first = chats.turn(ASKED)
    assert first.take_key is None
    answer = AnswerChoice(message=SAID)
    kept = await chats.conversations.keep(first, "d:1", PARAMS, answer, 3)
    assert kept.is_kept
    assert chats.turn(ASKED, SAID, NEXT).session != chats.turn(NEXT).session
    assert not await chats.finds_entry(ASKED, {**SAID, "content": "no"}, NEXT)
    assert not await chats.finds_entry(ASKED, SAID, NEXT, headers=((b"authorization", b"x"),))
    assert await chats.finds_entry(ASKED, SAID, NEXT)


CALLS: list[Any] = [
    {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1.0, "a": [2]}'}}
]


@pytest.mark.parametrize(
    ("said", "repeated"),
    [
        ({"content": "hi\n"}, [{"content": "hi"}]),
        ({"content": "<think>hm</think>\n\nhi"}, [{"content": "hi"}]),
        ({"content": "hi", "reasoning": "hm"}, [{"content": [{"type": "text", "text": "hi"}]}]),
        (
            {"content": None, "tool_calls": CALLS},
            [
                {
                    "content": "",
                    "tool_calls": [
                        {
                            "id": "toolu_1",
                            "type": "function",
                            "function": {"name": "f", "arguments": '{"a":[2],"b":1}'},
                        }
                    ],
                }
            ],
        ),
        (
            {"content": "hi", "tool_calls": CALLS},
            [{"content": "hi"}, {"content": None, "tool_calls": CALLS}],
        ),
    ],
    ids=["trimmed", "thoughts in the text", "a part", "arguments rewritten", "two messages"],
)
async def test_an_answer_is_recognised_as_clients_repeat_it(
    said: dict[str, Any], repeated: list[dict[str, Any]]
) -> None:
    chats = Chats()
    answer = AnswerChoice(message={"role": "assistant", **said})
    await chats.conversations.keep(chats.turn(ASKED), "d:1", PARAMS, answer, 3)
    assert await chats.finds_entry(ASKED, *[{"role": "assistant", **r} for r in repeated], NEXT)


async def test_without_the_answer_a_chat_cannot_be_recognised_again() -> None:
    chats = Chats()
    kept = await chats.conversations.keep(chats.turn(ASKED), "d:1", PARAMS, None, 3)
    assert not kept.is_kept


async def test_a_chat_neither_takes_nor_misreads_what_lies_under_the_id_alone() -> None:
    """There the version before kept chats, and this one keeps texts."""
    conversations = Conversations(MemoryStore(9, 10**6), ORDER, "authorization", 450)
    text: dict[str, Any] = {"prompt": "hello", "conversation_id": "c"}
    chat: dict[str, Any] = {"messages": [ASKED, SAID, NEXT], "conversation_id": "c"}
    first = conversations.turn_of((), text)
    assert first is not None
    await conversations.keep(first, "d:1", PARAMS, AnswerChoice(text="hi"), 3)
    for body, expected in ((chat, RecallOutcome.NEW), (text, RecallOutcome.ENTRY)):
        turn = conversations.turn_of((), body)
        assert turn is not None
        await conversations.recall(turn)
        assert turn.recalled is expected
