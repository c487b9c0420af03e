"""All subscribers of a stream find the same events, for all line ends and numbers of data lines."""

import json
from collections.abc import Callable

import orjson
import pytest

from router.auth.streamed_usage import StreamedUsage
from router.openai.answers import chunks_in
from router.proxy.load_failure import LoadFailure, LoadFailureWatch
from router.proxy.relay import TurnTail, stream_usage
from router.telemetry.record import Tokens
from router.telemetry.request_metrics import tokens_in
from scripts.mock_engine import DONE
from tests.unit.router.mock_engine import event

REPORT = {
    "scope": "pair",
    "remote_engine_id": "a",
    "remote_host": "h",
    "remote_port": 1,
    "reason": "gone",
}
FAILURE = LoadFailure(is_of_pair=True, remote="a at h:1", reason="gone")
PARAMS = {"remote_block_ids": [[1, 2]], "remote_host": "h"}
LINE_ENDS = pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])


def lines_of(content: object, before: bytes = b"") -> bytes:
    """An event with a line of data for each line of indented JSON."""
    lines = json.dumps(content, indent=1).encode().split(b"\n")
    return before + b"".join(b"data: " + line + b"\n" for line in lines) + b"\n"


def in_one_line(content: object, before: bytes = b"") -> bytes:
    return before + b"data: " + orjson.dumps(content) + b"\n\n"


FORMS = pytest.mark.parametrize("written", [lines_of, in_one_line])


@LINE_ENDS
@FORMS
def test_a_reported_load_failure_is_removed_from_an_error(
    written: Callable[..., bytes], line_end: bytes
) -> None:
    error = {"error": {"message": "not loaded", "kv_load_failure": REPORT}}
    block = (event("a") + written(error, b"event: error\n") + DONE).replace(b"\n", line_end)
    failures: list[LoadFailure] = []
    watch = LoadFailureWatch(failures.append)
    passed = watch.passing(block)
    without = in_one_line({"error": {"message": "not loaded"}}, b"event: error\n")
    assert passed == (event("a") + without + DONE).replace(b"\n", line_end)
    assert failures == [FAILURE]
    assert watch.has_ended


@LINE_ENDS
def test_a_reported_load_failure_is_removed_from_a_comment(line_end: bytes) -> None:
    comment = b": kv_load_failure " + orjson.dumps(REPORT) + b"\n"
    failures: list[LoadFailure] = []
    watch = LoadFailureWatch(failures.append)
    block = (event("a") + comment + event("b")).replace(b"\n", line_end)
    assert watch.passing(block) == (event("a") + event("b")).replace(b"\n", line_end)
    assert failures == [FAILURE]
    assert not watch.has_ended


@LINE_ENDS
@FORMS
def test_params_of_a_turn_are_taken_from_their_event(
    written: Callable[..., bytes], line_end: bytes
) -> None:
    last = {"choices": [{"index": 0, "delta": {"content": "b"}, "finish_reason": "stop"}]}
    block = event("a") + written({**last, "kv_transfer_params": PARAMS}, b"id: 7\n")
    tail = TurnTail()
    passed = tail.passing(block.replace(b"\n", line_end), False)
    passed += tail.passing(DONE, False) + tail.passing(b"", True) + tail.last
    whole = (event("a") + in_one_line(last, b"id: 7\n")).replace(b"\n", line_end) + DONE
    assert passed == whole
    assert tail.params == PARAMS


@LINE_ENDS
@FORMS
def test_usage_is_found_at_the_end_of_a_stream(
    written: Callable[..., bytes], line_end: bytes
) -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 4}
    tail = event("a")[9:] + written({"choices": [], "usage": usage}) + DONE
    found = stream_usage(tail.replace(b"\n", line_end))
    assert tokens_in(found) == Tokens(3, 4, None)


@LINE_ENDS
@FORMS
def test_chunks_are_counted_and_nothing_else_is(
    written: Callable[..., bytes], line_end: bytes
) -> None:
    text = {"choices": [{"index": 0, "text": 'data: {"data: {\n\ndata: {'}]}
    block = (written(text) * 3 + b": data: {\n\n" + event("a") + DONE).replace(b"\n", line_end)
    counter = counter_for()
    assert counter.passing(block) == block
    assert counter.completion_tokens == len(list(chunks_in(block))) == 4


def counter_for(**options: bool) -> StreamedUsage:
    asked = StreamedUsage.ask({"stream": True, "stream_options": options})
    assert asked is not None
    counter, body = asked
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    return counter


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, [None, None, None]),
        ({"continuous_usage_stats": True}, [None, None, None]),
        ({"include_usage": True}, [None, None, 9]),
        ({"include_usage": True, "continuous_usage_stats": True}, [5, 8, 9]),
    ],
)
@LINE_ENDS
@FORMS
def test_usage_is_counted_and_reaches_only_clients_that_asked_for_it(
    written: Callable[..., bytes], line_end: bytes, options: dict[str, bool], left: list[int | None]
) -> None:
    def chunk(text: str, tokens: int) -> bytes:
        choices = [{"index": 0, "text": text}] if text else []
        return written({"choices": choices, "usage": {"completion_tokens": tokens, "d": {"c": 1}}})

    counter = counter_for(**options)
    text = 'a,"usage":{"completion_tokens":77}}'
    blocks = (chunk(text, 5), chunk("b", 8) + b": x\n\n", chunk("", 9) + DONE)
    passed, counted = [], []
    for block in blocks:
        passed.append(counter.passing(block.replace(b"\n", line_end)))
        counted.append(counter.completion_tokens)
    assert counted == [5, 8, 9]
    chunks = [next(iter(chunks_in(block)), {}) for block in passed]
    assert [(one.get("usage") or {}).get("completion_tokens") for one in chunks] == left
    assert [one["choices"][0]["text"] for one in chunks[:2]] == [text, "b"]
    assert [one.get("choices") for one in chunks[2:]] == [[] if left[2] else None]
    assert passed[2].endswith(DONE.replace(b"\n", line_end))
