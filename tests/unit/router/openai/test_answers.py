"""Whole answers and streams made of them."""

from typing import Any

import pytest

from router.openai.answers import (
    can_stream,
    chunks_in,
    read_choice,
    read_streamed_choice,
    stream_events,
)

CALL = {"id": "c", "type": "function", "function": {"name": "look_up", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": [{}]},
        {"object": [], "choices": [{}]},
        {"object": "list", "choices": [{}]},
        {"object": "chat.completion", "choices": []},
        {"object": "chat.completion", "choices": [1]},
        {"object": "chat.completion"},
    ],
)
def test_other_content_cannot_be_streamed(answer: dict[str, Any]) -> None:
    assert not can_stream(answer)


@pytest.mark.parametrize(
    ("kind", "choice"),
    [
        ("chat.completion", {"message": {"role": "assistant", "content": "hello"}}),
        ("chat.completion", {"message": {"role": "assistant", "reasoning": "hm", "content": "a"}}),
        ("text_completion", {"text": "hello", "token_ids": [1, 2]}),
    ],
)
def test_stream_of_an_answer_has_the_choice_of_the_answer(
    kind: str, choice: dict[str, Any]
) -> None:
    usage = {"prompt_tokens": 3}
    answer = {"object": kind, "choices": [{"index": 0, **choice}], "usage": usage}
    assert can_stream(answer)
    stream = stream_events(answer, {"stream_options": {"include_usage": True}})
    assert read_streamed_choice(chunks_in(stream)) == read_choice(answer)


def test_tool_calls_of_a_stream_have_an_index() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    answer = {"object": "chat.completion", "choices": [{"index": 0, "message": message}]}
    found = read_streamed_choice(chunks_in(stream_events(answer, {})))
    assert found is not None
    assert found.message is not None
    assert found.message["tool_calls"] == [{"index": 0, **CALL}]
