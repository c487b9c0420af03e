"""Chunks and sizes of prompts: any JSON has them, and an extension begins as the prompt did."""

import subprocess
import sys
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.routing.prompt_chunks import (
    CHUNK_BYTES,
    MAX_CHUNKS,
    TOKENS_PER_CHUNK,
    describe_part,
    estimate_tokens,
    hash_chunks,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.text() | st.sampled_from(["role", "content", "text", "type", "tool_calls"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
TEXT = st.text(min_size=1, max_size=40).map(lambda text: text * 60)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system"]),
            "content": TEXT | st.lists(st.builds(lambda t: {"type": "text", "text": t}, TEXT)),
        }
    ),
    max_size=5,
)


@given(st.dictionaries(st.sampled_from(["messages", "prompt", "tools", "model"]), JSON))
def test_any_json_has_chunks_and_a_size(body: dict[str, Any]) -> None:
    assert len(hash_chunks(body)) <= MAX_CHUNKS
    assert estimate_tokens(body) >= 0


@given(MESSAGES, MESSAGES)
def test_a_longer_conversation_begins_with_the_shorter_ones_chunks(
    messages: list[Any], more: list[Any]
) -> None:
    shorter = hash_chunks({"model": "m", "messages": messages})
    longer = hash_chunks({"model": "m", "messages": messages + more})
    assert longer[: len(shorter)] == shorter
    assert len(set(longer)) == len(longer)


@given(TEXT, TEXT)
def test_a_longer_text_begins_with_the_shorter_ones_chunks(text: str, more: str) -> None:
    shorter = hash_chunks({"prompt": text})
    assert hash_chunks({"prompt": text + more})[: len(shorter)] == shorter
    assert len(shorter) == len(text.encode("utf-8", "surrogatepass")) // CHUNK_BYTES


def test_an_early_difference_changes_all_chunks_after_it() -> None:
    one, other = "a" * 5000, "a" * 1500 + "b" + "a" * 3499
    same = [
        a == b
        for a, b in zip(hash_chunks({"prompt": one}), hash_chunks({"prompt": other}), strict=True)
    ]
    assert same == [True, False, False, False]


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"cache_salt": "s"},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
    ],
)
def test_another_model_salt_or_tool_set_shares_nothing(change: dict[str, Any]) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 5000}]}
    assert not set(hash_chunks(body)) & set(hash_chunks({**body, **change}))


def test_roles_and_ends_of_messages_count() -> None:
    def chunks(*messages: tuple[str, str]) -> tuple[int, ...]:
        return hash_chunks({"messages": [{"role": r, "content": c} for r, c in messages]})

    x = "x" * 600
    assert len({chunks(("user", x + x)), chunks(("user", x), ("user", x)),
                chunks(("user", x), ("system", x))}) == 3  # fmt: skip


@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=3 * TOKENS_PER_CHUNK))
def test_token_ids_are_counted_exactly(ids: list[int]) -> None:
    assert estimate_tokens({"prompt": ids}) == estimate_tokens({"prompt": [ids]}) == len(ids)
    assert len(hash_chunks({"prompt": ids})) == len(ids) // TOKENS_PER_CHUNK
    assert hash_chunks({"prompt": [*ids, 1]})[: len(ids) // TOKENS_PER_CHUNK] == hash_chunks(
        {"prompt": ids}
    )


def test_a_token_is_about_four_bytes() -> None:
    assert estimate_tokens({"prompt": "word" * 100}) == 100
    assert estimate_tokens({"prompt": "字" * 400}) == 300
    assert estimate_tokens({"messages": [{"role": "user", "content": "word" * 100}]}) == 104
    assert estimate_tokens({"messages": ["word" * 100, 7]}) == 8, "engines read no such message"


def test_long_prompts_and_images_are_read_in_part() -> None:
    assert len(hash_chunks({"prompt": "x" * 10**7})) == MAX_CHUNKS
    image = {"type": "image_url", "image_url": {"url": "data:" + "A" * 10**6}}
    other = {"type": "image_url", "image_url": {"url": "data:" + "A" * 10**6 + "B"}}
    text = {"type": "text", "text": "x" * 3000}
    chunks = [hash_chunks({"messages": [{"content": [i, text]}]}) for i in (image, other)]
    assert len(chunks[0]) == 3
    assert not set(chunks[0]) & set(chunks[1])
    assert estimate_tokens({"messages": [{"content": [image, text]}]}) < 3000


def test_deeply_nested_json_is_only_measured() -> None:
    deep: Any = "x" * 4000
    for _ in range(5000):
        deep = [deep]
    assert estimate_tokens({"prompt": deep}) >= 0
    assert hash_chunks({"prompt": deep}) == ()
    message = {"role": "user", "content": deep, "tool_calls": deep}
    assert estimate_tokens({"messages": [message], "tools": deep}) >= 0
    assert hash_chunks({"messages": [message], "tools": deep}) == ()


def test_chunks_are_the_same_in_every_process() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "wort " * 1000}]}
    code = (
        "import sys, orjson\nfrom router.routing.prompt_chunks import hash_chunks\n"
        "print(*hash_chunks(orjson.loads(sys.argv[1])))"
    )
    run = [sys.executable, "-c", code, orjson.dumps(body).decode()]
    told = subprocess.run(run, capture_output=True, text=True, check=True, env={"PYTHONPATH": "."})
    assert tuple(map(int, told.stdout.split())) == hash_chunks(body)


TOOLS = [{"type": "function", "function": {"name": "read", "description": "é" * 1000}}]
CHAT = [
    {"role": "system", "content": "s" * 2000},
    {"role": "user", "content": "é" * 1000},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "arguments": "a" * 2000}]},
]


@pytest.mark.parametrize(
    ("body", "start", "where"),
    [
        ({"messages": CHAT}, 0, "the system prompt, after 0 to 256 of about 1,515 tokens"),
        ({"messages": CHAT}, 1, "the system prompt to message 2 of 3, after 256 to 512 "),
        ({"messages": CHAT}, 2, "message 2 of 3, after 512 to 768 "),
        ({"messages": CHAT}, 4, "message 3 of 3, after 1,024 to 1,280 "),
        ({"messages": CHAT, "tools": TOOLS}, 1, "the tools, after 256 "),
        ({"messages": CHAT, "tools": TOOLS}, 2, "the tools to the system prompt, after 512 "),
        ({"messages": [7, *CHAT[1:]]}, 0, "message 2 of 3, after 0 "),
        ({"prompt": "x" * 2048}, 1, "the prompt, after 256 to 512 of about 512 tokens"),
        ({"prompt": [*range(512)]}, 1, "the prompt, after 256 to 512 of about 512 tokens"),
    ],
)
def test_a_chunk_belongs_to_a_part_of_the_prompt(
    body: dict[str, Any], start: int, where: str
) -> None:
    assert describe_part(body, start, start + 1).startswith(where)
