"""Tool calls whose pieces arrive in any order, as blocks of messages and items of responses."""

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.openai.anthropic_messages import MessageOutput
from router.openai.dialects import MAX_ANSWER_CHARS, AnswerBlocks, JsonDepth
from router.openai.responses import ResponseOutput
from tests.unit.router.openai.chats import events_of

Piece = dict[str, Any]
# The name and the arguments of a call.
Call = tuple[str, str]


def call_piece(index: int, *, id: str = "", name: str = "", arguments: str | None = None) -> Piece:
    function = {"name": name} if name else {}
    if arguments is not None:
        function["arguments"] = arguments
    named = {"id": id, "type": "function"} if id else {}
    return {"index": index, **named, **({"function": function} if function else {})}


def chunks_of(deltas: Iterable[Piece | list[Piece] | str], finish: str) -> list[Piece]:
    """Return the chunks of a stream: a text, one piece of a call, or several in one chunk."""
    chunks = []
    for delta in deltas:
        pieces = delta if isinstance(delta, list) else [delta]
        shown = {"content": delta} if isinstance(delta, str) else {"tool_calls": pieces}
        chunks.append({"choices": [{"index": 0, "delta": shown}]})
    return [*chunks, {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}]


def streamed_message(chunks: Iterable[Piece]) -> list[Piece]:
    answer = AnswerBlocks()
    output = MessageOutput(answer, "msg_1", "m")
    raw = b"".join(event for chunk in chunks for event in output.events(answer.add(chunk)))
    raw += b"".join([*output.events(answer.close()), *output.last_events()])
    events = events_of(raw.decode())
    content = content_of(events)
    assert content == output.whole()["content"]
    return content


def content_of(events: list[Piece]) -> list[Piece]:
    """Return the blocks of a streamed message, of which only one may be open at a time."""
    content: list[Piece] = []
    written, is_open = "", False
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(content)
                content.append(event["content_block"])
                written, is_open = "", True
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(content) - 1
                delta = event["delta"]
                written += delta.get("text", "") + delta.get("partial_json", "")
            case "content_block_stop":
                assert is_open
                assert event["index"] == len(content) - 1
                is_open = False
                if content[-1]["type"] == "tool_use":
                    content[-1]["input"] = json.loads(written)
                else:
                    content[-1]["text"] = written
    assert not is_open
    return content


def streamed_response(chunks: Iterable[Piece]) -> list[Piece]:
    answer = AnswerBlocks()
    output = ResponseOutput(answer, {}, "resp_1", 0)
    raw = b"".join(event for chunk in chunks for event in output.events(answer.add(chunk)))
    raw += b"".join([*output.events(answer.close()), *output.last_events()])
    events = events_of(raw.decode())
    items = items_of(events)
    assert items == events[-1]["response"]["output"]
    return items


def items_of(events: list[Piece]) -> list[Piece]:
    """Return the items of a streamed response, of which only one may be open at a time."""
    items: list[Piece] = []
    written, is_open = "", False
    for event in events:
        match event["type"]:
            case "response.output_item.added":
                assert not is_open
                assert event["output_index"] == len(items)
                items.append(event["item"])
                written, is_open = "", True
            case "response.function_call_arguments.delta" | "response.output_text.delta":
                assert is_open
                assert event["output_index"] == len(items) - 1
                written += event["delta"]
            case "response.function_call_arguments.done":
                assert event["arguments"] == written
            case "response.output_item.done":
                assert is_open
                item = event["item"]
                assert item["id"] == items[-1]["id"]
                assert written == item.get("arguments") or written == item["content"][0]["text"]
                items[-1], is_open = item, False
    assert not is_open
    return items


def calls_of_message(chunks: Iterable[Piece]) -> list[tuple[str, str, Piece]]:
    blocks = [block for block in streamed_message(chunks) if block["type"] == "tool_use"]
    return [(block["id"], block["name"], block["input"]) for block in blocks]


def calls_of_response(chunks: Iterable[Piece]) -> list[tuple[str, str, Piece]]:
    items = [item for item in streamed_response(chunks) if item["type"] == "function_call"]
    return [(item["call_id"], item["name"], json.loads(item["arguments"])) for item in items]


F, G = ("a", "f", {"x": 1}), ("b", "g", {"y": "}"})
BEGIN_F, BEGIN_G = call_piece(0, id="a", name="f"), call_piece(1, id="b", name="g")
F_START, F_END = call_piece(0, arguments='{"x"'), call_piece(0, arguments=": 1}")
WHOLE_G = call_piece(1, id="b", name="g", arguments='{"y": "}"}')
G_START, G_END = call_piece(1, arguments='{"y": "}'), call_piece(1, arguments='"}')


@pytest.mark.parametrize("calls_of", [calls_of_message, calls_of_response])
@pytest.mark.parametrize(
    "deltas",
    [
        pytest.param([BEGIN_F, F_START, F_END, BEGIN_G, G_START, G_END], id="one-by-one"),
        pytest.param([BEGIN_F, F_START, BEGIN_G, G_START, F_END, G_END], id="interleaved"),
        pytest.param([BEGIN_F, BEGIN_G, G_START, G_END, F_START, F_END], id="the-last-first"),
        pytest.param([[BEGIN_F, BEGIN_G], [F_START, G_START], [G_END, F_END]], id="in-one-chunk"),
        pytest.param([BEGIN_F, F_START, "hm", F_END, BEGIN_G, G_START, "m", G_END], id="text"),
        pytest.param(
            [call_piece(0, id="a"), call_piece(0, name="f"), F_START, F_END, WHOLE_G],
            id="name-later-than-id",
        ),
        pytest.param(
            [call_piece(0, name="f"), F_START, F_END, call_piece(0, id="a"), WHOLE_G],
            id="id-last",
        ),
        pytest.param([F_START, F_END, BEGIN_F, G_START, BEGIN_G, G_END], id="arguments-first"),
        pytest.param(
            [BEGIN_F, F_START, F_END, call_piece(0, id="b", name="g", arguments='{"y": "}"}')],
            id="two-ids-under-one-index",
        ),
        pytest.param(
            [
                call_piece(0, id="a", name="f", arguments='{"x"'),
                call_piece(0, id="b", name="g", arguments='{"y": '),
                call_piece(0, id="a", arguments=": 1}"),
                call_piece(0, id="b", arguments='"}"}'),
            ],
            id="two-ids-under-one-index-interleaved",
        ),
        pytest.param(
            [
                BEGIN_F,
                call_piece(0, id="new", arguments='{"x"'),
                call_piece(0, id="newer", arguments=": 1}"),
                WHOLE_G,
            ],
            id="a-new-id-with-each-piece",
        ),
        pytest.param(
            [
                call_piece(0, id="a", name="f", arguments='{"x"'),
                call_piece(0, id="a", name="f", arguments=": 1}"),
                WHOLE_G,
                call_piece(1, id="b", name="g", arguments=""),
            ],
            id="id-and-name-in-each-piece",
        ),
    ],
)
def test_pieces_of_calls_in_any_order_make_the_same_calls(
    calls_of: Any, deltas: list[Piece]
) -> None:
    calls = calls_of(chunks_of(deltas, "tool_calls"))
    assert sorted(calls, key=lambda call: str(call[0])) == [F, G]


@pytest.mark.parametrize("calls_of", [calls_of_message, calls_of_response])
@pytest.mark.parametrize("arguments", [None, "", " ", "null", "{}"])
def test_a_call_without_arguments_has_an_empty_object(calls_of: Any, arguments: str | None) -> None:
    pieces = [call_piece(0, id="a", name="f"), call_piece(1, id="b", name="g", arguments="{}")]
    if arguments is not None:
        pieces.insert(1, call_piece(0, arguments=arguments))
    assert calls_of(chunks_of(pieces, "tool_calls")) == [("a", "f", {}), ("b", "g", {})]


@pytest.mark.parametrize("calls_of", [calls_of_message, calls_of_response])
def test_arguments_may_be_an_object_instead_of_its_text(calls_of: Any) -> None:
    piece = call_piece(0, id="a", name="f")
    piece["function"]["arguments"] = {"x": {"y": "é"}}
    assert calls_of(chunks_of([piece], "tool_calls")) == [("a", "f", {"x": {"y": "é"}})]


def test_calls_without_ids_get_different_ones() -> None:
    pieces = [call_piece(0, name="f", arguments="{}"), call_piece(1, name="f", arguments="{}")]
    first, second = calls_of_message(chunks_of(pieces, "tool_calls"))
    assert first[0] != second[0]
    assert first[0].startswith("call_")


def test_an_id_without_a_name_or_arguments_is_no_call() -> None:
    chunks = chunks_of([call_piece(0, id="a"), {"index": 1}, "Hello"], "stop")
    assert streamed_message(chunks) == [{"type": "text", "text": "Hello"}]


def test_the_next_call_is_streamed_once_the_one_before_is_complete() -> None:
    answer = AnswerBlocks()
    output = MessageOutput(answer, "msg_1", "m")
    deltas = [BEGIN_F, F_START, F_END, BEGIN_G, G_START]
    for chunk in chunks_of(deltas, "tool_calls")[:-1]:
        raw = b"".join(output.events(answer.add(chunk)))
    assert b"partial_json" in raw
    assert b'"index":1' in raw


def test_a_failed_answer_ends_only_the_block_that_has_begun() -> None:
    chunks = chunks_of([BEGIN_F, F_START, BEGIN_G, G_START, G_END], "abort")
    answer = AnswerBlocks()
    steps = [step for chunk in chunks for step in answer.add(chunk)] + list(answer.close())
    assert {step.block.id for step in steps} == {"a"}
    assert [block.id for block in answer.blocks] == ["a"]


def test_many_calls_without_text_are_bounded() -> None:
    answer = AnswerBlocks()
    for index in range(MAX_ANSWER_CHARS // 256):
        list(answer.add(chunks_of([call_piece(index, id="a", name="f")], "stop")[0]))
        if answer.error is not None:
            break
    assert answer.error == {"message": "the answer is too large", "type": "BadGatewayError"}


CALLS = st.tuples(
    st.sampled_from("fg"),
    st.dictionaries(st.text(max_size=3), st.text('{}[]"\\a', max_size=4), max_size=2),
)


@given(st.data(), st.lists(CALLS, min_size=1, max_size=3))
def test_any_order_of_pieces_makes_the_same_calls(
    data: st.DataObject, calls: list[tuple[str, dict[str, str]]]
) -> None:
    waiting: list[list[Piece | str]] = []
    for index, (name, arguments) in enumerate(calls):
        written = json.dumps(arguments)
        cuts = sorted(data.draw(st.sets(st.integers(0, len(written)), max_size=3)))
        ends = [*cuts, len(written)]
        pieces: list[Piece | str] = [
            call_piece(index, arguments=written[start:end])
            for start, end in zip([0, *ends], ends, strict=False)
        ]
        # The id and the name come at any place between the arguments.
        for more in (call_piece(index, id=f"id{index}"), call_piece(index, name=name)):
            pieces.insert(data.draw(st.integers(0, len(pieces))), more)
        waiting.append(pieces)
    waiting.append(["hm", "m"])
    deltas = []
    while waiting:
        source = data.draw(st.sampled_from(waiting))
        deltas.append(source.pop(0))
        waiting = [pieces for pieces in waiting if pieces]
    chunks = chunks_of(deltas, "tool_calls")
    expected = [(f"id{index}", name, given) for index, (name, given) in enumerate(calls)]
    assert sorted(calls_of_message(chunks)) == expected
    assert sorted(calls_of_response(chunks)) == expected


LONG_ARGUMENTS = json.dumps({"text": 'a "{[\\' * 2000, "list": [{}, [1]]})


@pytest.mark.parametrize("before", ["", " ", "{}", "{", '"', "\\"])
@pytest.mark.parametrize(
    "text",
    [
        LONG_ARGUMENTS,
        f" \n{LONG_ARGUMENTS} ",
        LONG_ARGUMENTS[:-1],
        LONG_ARGUMENTS + "}",
        LONG_ARGUMENTS + LONG_ARGUMENTS,
        json.dumps("}" * 9000),
        "[" * 9000 + "]" * 9000,
        "null" + " " * 9000,
        "\ud800" * 9000,
    ],
    ids=range(9),
)
def test_the_end_of_long_arguments_is_found_as_in_small_pieces(before: str, text: str) -> None:
    whole, split = JsonDepth(), JsonDepth()
    for piece in (before, text, "]}"):
        whole.feed(piece)
    for start in range(0, len(text) + len(before) + 2, 100):
        split.feed(f"{before}{text}]}}"[start : start + 100])
    assert (whole.first, whole.is_complete) == (split.first, split.is_complete)
