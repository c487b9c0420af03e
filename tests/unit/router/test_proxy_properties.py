"""Properties of the pure parts: bodies, headers, events, turns, errors, records."""

import contextlib
import json
import logging

import httptools
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple

from router.http_client import errors as upstream
from router.http_client.errors import BrokenAnswerError
from router.openai import errors
from router.proxy import messages
from router.proxy.answer_check import PrefillAnswer
from router.proxy.dispatch import read_request_id
from router.proxy.internal_fields import without_internal_fields
from router.proxy.request import Body, find_decode_only_reason, parse_body
from router.telemetry.logs import (
    LINES,
    AccessLine,
    JsonFormatter,
    LogFormat,
    LogThrottle,
    ShortFormatter,
    TextFormatter,
    formatter_for,
)
from router.telemetry.record import Record
from router.telemetry.request_metrics import tokens_in, tokens_of, usage_in

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
BODIES = st.dictionaries(
    st.sampled_from(
        ["model", "prompt", "messages", "n", "best_of", "max_tokens", "stream", "vllm_xargs",
         "min_tokens", "stream_options", "kv_transfer_params", "max_completion_tokens"]
    ),
    JSON_VALUES,
)  # fmt: skip


@given(BODIES)
def test_a_prefill_body_changes_what_it_must_and_nothing_else(body: Body) -> None:
    before = orjson.dumps(body)
    leg = json.loads(b"".join(messages.LegBodies(without_internal_fields(body)).prefill()))
    assert orjson.dumps(body) == before, "the client's body is needed again"
    edited = {"max_tokens", "max_completion_tokens", "stream", "kv_transfer_params", "vllm_xargs"}
    dropped = {"stream_options", "min_tokens", "min_completion_tokens", "n"}
    assert leg["max_tokens"] == 1
    assert leg["stream"] is False
    assert leg["kv_transfer_params"] == messages.PREFILL_PARAMS
    assert not dropped & leg.keys()
    assert leg.get("max_completion_tokens", 1) == 1
    assert ("max_completion_tokens" in leg) == ("max_completion_tokens" in body)
    untouched = body.keys() - edited - dropped
    assert {name: leg[name] for name in untouched} == {name: body[name] for name in untouched}


@given(BODIES, JSON_VALUES)
def test_no_params_of_a_client_survive(body: Body, forged: object) -> None:
    body = {**body, "kv_transfer_params": forged, "vllm_xargs": {"kv_transfer_params": forged}}
    kept = without_internal_fields(body)
    assert without_internal_fields(kept) is kept
    assert kept["vllm_xargs"] == {}


@given(JSON_VALUES)
def test_whatever_json_a_prefiller_answers_is_read_or_refused(content: object) -> None:
    try:
        answer = PrefillAnswer(orjson.dumps(content))
    except BrokenAnswerError:
        if isinstance(content, dict):
            given = content.get("kv_transfer_params")
            assert given == {} or not isinstance(given, dict)
            assert not content.get("choices")
    else:
        assert isinstance(content, dict)
        given, usage = content.get("kv_transfer_params"), content.get("usage")
        assert (answer.params is not None) == (isinstance(given, dict) and bool(given))
        if answer.params is not None:
            assert answer.params.content == given
            body = b"".join(messages.LegBodies({}).decode(answer.params, retains=True))
            assert orjson.loads(body)["kv_transfer_params"] == {**given, "retain": True}
        tokens = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        assert tokens_in(answer.usage).prompt in (None, tokens)
    assert isinstance(messages.error_text(orjson.dumps(content)), str)


@given(JSON_VALUES, JSON_VALUES, JSON_VALUES)
def test_no_prompt_breaks_the_choice_of_a_plan(prompt: object, n: object, best: object) -> None:
    reason = find_decode_only_reason({"prompt": prompt, "n": n, "best_of": best})
    assert reason in ("", "n", "best_of", "prompt_list")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"prompt": "x"}, None),
        ({"prompt": [1, 2]}, None),
        ({"prompt": [[1, 2]]}, None),
        ({"prompt": []}, None),
        ({"messages": [{"role": "user"}, {"role": "user"}]}, None),
        ({"prompt": "x", "n": "2"}, "n"),
        ({"prompt": "x", "n": 1.0}, None),
        ({"prompt": ["x"], "prompt_embeds": "eA=="}, "prompt_list"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"prompt_logprobs": False}, ""),
        ({"echo": True, "logprobs": 0}, "echo"),
        ({"echo": True, "logprobs": None}, ""),
        ({"prompt_embeds": ["a", "b"]}, "prompt_list"),
        ({"use_beam_search": False}, None),
    ],
)
def test_only_a_single_sequence_is_pulled(body: Body, reason: str | None) -> None:
    assert find_decode_only_reason(body) == (reason or "")


@pytest.mark.parametrize("line", [b"x: a%cb", b"x%cy: ab", b"x:%cb", b"x: a%c"])
def test_the_servers_parser_passes_no_header_that_breaks_its_line(line: bytes) -> None:
    """So headers need not be searched for line ends before they are sent to an engine."""

    class Headers:
        def on_header(self, name: bytes, value: bytes) -> None:
            heard.append((name, value))

    heard: list[tuple[bytes, bytes]] = []
    for byte in range(256):
        parser = httptools.HttpRequestParser(Headers())
        head = b"POST / HTTP/1.1\r\nhost: h\r\n" + line % byte + b"\r\n\r\n"
        with contextlib.suppress(httptools.HttpParserError):
            parser.feed_data(head)
    assert len(heard) > 128
    assert not any(byte in name + value for name, value in heard for byte in b"\r\n\0")


def test_headers_nominated_by_connection_stay() -> None:
    given = [(b"connection", b"X-One , close"), (b"connection", b"x-two"), (b"x-one", b"1")]
    given += [(b"x-two", b"2"), (b"x-three", b"3")]
    assert messages.header_lines(given) == b"x-three: 3\r\n"
    assert messages.to_client([(b"connection", b"")], "a", False) == [(b"x-request-id", b"a")]


def _leaves(kind: type[Exception]) -> list[type[Exception]]:
    below = kind.__subclasses__()
    return [kind, *[leaf for sub in below for leaf in _leaves(sub)]]


ARGUMENTS: dict[type[Exception], tuple[object, ...]] = {
    errors.RejectedMidStreamError: ("why", 400),
    errors.UnservedModelError: ("why", errors.EngineRejectedError(404, [], b"")),
    errors.UpgradeRequiredError: (),
}
"""The arguments of errors that need more than a message."""


@pytest.mark.parametrize(
    "kind",
    [k for k in _leaves(upstream.UpstreamError) + _leaves(errors.RequestError)
     if k not in (errors.EngineRejectedError, errors.OperatorError, errors.RequestError)],
)  # fmt: skip
def test_every_failure_has_a_status_of_its_own_and_a_body(kind: type[Exception]) -> None:
    error = kind(*ARGUMENTS.get(kind, ("why",)))
    shape = errors.shape_of(error)
    assert 400 <= shape.status < 600
    assert shape.status != 500
    content = json.loads(errors.body_of(error))["error"]
    assert content["code"] == (getattr(error, "code", None) or shape.status)
    assert json.loads(errors.event_of(error)[6:-2])["error"] == content


def test_an_unexpected_exception_tells_a_client_nothing() -> None:
    assert errors.shape_of(KeyError("secret")).status == 500
    assert b"secret" not in errors.body_of(KeyError("secret"))


@given(st.binary())
def test_any_bytes_are_a_body_or_a_bad_request(raw: bytes) -> None:
    try:
        body = parse_body(raw)
    except errors.BadRequestError:
        return
    assert orjson.loads(messages.encode_body(body)) == body


def test_a_throttle_speaks_once_per_period_and_counts(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    throttle = LogThrottle(logging.getLogger("t"), period_s=10, clock=lambda: now[0])
    for _ in range(5):
        throttle.warn("it failed", "so")
    throttle.warn("another", "thing")
    now[0] = 10.0
    throttle.warn("it failed", "again")
    said = [record.getMessage() for record in caplog.records]
    assert said[:2] == ["it failed: so", "another: thing"]
    assert said[2] == "it failed: again (4 more since the last such line)"


USAGE = b'"usage":{"prompt_tokens":37,"total_tokens":45,"completion_tokens":8,'
USAGE += b'"prompt_tokens_details":{"cached_tokens":32}},"x":1}'
TOLD = usage_in(USAGE)
SECONDS = st.none() | st.floats(0, 1000)
NAMES = st.sampled_from(["", "h:1"])


@given(
    times=st.tuples(SECONDS, SECONDS, SECONDS),
    names=st.tuples(NAMES, NAMES),
    stage=st.sampled_from(["done", "stream"]),
    conversation=st.sampled_from(["", "hit"]),
    usage=st.sampled_from([b"", b"null", USAGE, USAGE[:30], b"\xff" * 40]),
)
def test_an_access_line_has_the_same_fields_as_text_and_as_json(
    times: tuple[float | None, float | None, float | None],
    names: tuple[str, str],
    stage: str,
    conversation: str,
    usage: bytes,
) -> None:
    record = Record("/v1/completions", 0.0, "id", "pull", stage, "ok", 200, usage=usage)
    record.prefiller, record.decoder, record.conversation = *names, conversation
    record.prefill_done, record.first_byte, record.ended = times
    record.tokens = tokens_of(record)
    line = AccessLine(record, 0.0)
    said = "".join(f" {k}={v}" for k, v in line.content().items() if k != "message")
    assert line.text() == f"request{said}"
    assert json.loads(f"{{{line.json()}}}") == line.content()


def test_an_access_line_says_what_is_known_in_both_formats() -> None:
    record = Record("/v1/completions", 10.0, "id", flow="pull", outcome="ok", status=200)
    record.prefiller, record.prefill_done, record.ended = "p:1", 10.25, 11.0
    line = logging.LogRecord("a", logging.INFO, "", 0, "%d requests", (1,), None)
    setattr(line, LINES, [AccessLine(record, 0.25)])
    content = json.loads(JsonFormatter().format(line))
    assert content["request_id"] == "id"
    assert content["prefill_ms"] == 250
    assert content["total_ms"] == 1000
    assert "decoder" not in content
    assert content["time"] == "1970-01-01T00:00:00.250Z"
    text = TextFormatter().format(line)
    assert text.endswith("total_ms=1000 stage=receive")
    assert "request request_id=id endpoint=/v1/completions status=200 outcome=ok" in text


@pytest.mark.parametrize(
    ("usage", "prefill_usage", "expected"),
    [
        (USAGE, b"", (37, 8, 32)),
        (USAGE, b'{"prompt_tokens":1}', (37, 8, 32)),
        (b"", usage_in(USAGE), (37, None, 32)),
        (b'"usage": {"prompt_tokens": 3, "completion_tokens": 4}', b"", (3, 4, None)),
        (b"", b"null", (None, None, None)),
        (b'"usage":{"prompt_tokens":"x","completion_tokens":-1}', b"", (None, None, None)),
    ],
)
def test_tokens_are_the_decoders_else_the_prefillers(
    usage: bytes, prefill_usage: bytes, expected: tuple[int | None, ...]
) -> None:
    record = Record("/v1/completions", 0.0, usage=usage_in(usage), prefill_usage=prefill_usage)
    assert astuple(tokens_of(record)) == expected


def test_usage_is_found_near_the_end_and_not_in_what_was_said() -> None:
    said = json.dumps({"text": '"usage":{"prompt_tokens":9}'}).encode()[:-1]
    told = USAGE.removeprefix(b'"usage":').removesuffix(b',"x":1}')
    assert usage_in(said) == b""
    assert usage_in(said + b"," + USAGE) == told
    assert usage_in(b'{"usage": null,"kv_transfer_params":{"prompt_tokens":9}}') == b""
    assert usage_in(USAGE + b" " * 10_000) == b""
    assert usage_in(USAGE + b" " * 5_000) == told
    assert usage_in(b'"usage":{"a":"' + b"b" * 512 + b'"}') == b""


def test_on_a_terminal_a_line_is_short_and_says_tokens_speed_and_reuse() -> None:
    record = Record("/v1/chat/completions", 10.0, "id", "turn", "done", "ok", 200, usage=TOLD)
    record.prefiller, record.decoder, record.conversation = "p:1", "d:2", "hit"
    record.prefill_done, record.first_byte, record.ended = 10.25, 10.5, 11.0
    record.tokens = tokens_of(record)
    line = logging.LogRecord("a", logging.INFO, "", 0, "%d requests", (1,), None)
    setattr(line, LINES, [AccessLine(record, 0.25)])
    assert ShortFormatter().format(line).partition(" ")[2] == (
        "200 chat/completions; 37 tokens in, 8 out; first after 0.50 s, all after 1.00 s; "
        "prefill p:1 -> decode d:2; reused 32 of 37 (turn: hit)"
    )


@pytest.mark.parametrize(
    ("is_terminal", "log_format", "formatter"),
    [
        (True, "auto", ShortFormatter),
        (False, "auto", JsonFormatter),
        (False, "short", ShortFormatter),
        (True, "json", JsonFormatter),
        (True, "text", TextFormatter),
    ],
)
def test_the_format_is_that_of_who_reads_it(
    is_terminal: bool, log_format: LogFormat, formatter: type
) -> None:
    assert isinstance(formatter_for(log_format, is_terminal), formatter)


@pytest.mark.parametrize(
    ("offered", "said"),
    [
        (b'{"remote_block_ids":[[7,8,9]],"remote_port":5600}', "; 3 blocks offered; "),
        (b'{"remote_block_ids": [[1], [22]]}', "; 2 blocks offered; "),
        (b'{"remote_block_ids":[4]}', "; 1 block offered; "),
        (b'{"remote_block_ids":[]}', ""),
        (b'{"remote_block_ids":"many"}', ""),
        (b"", ""),
    ],
)
def test_short_line_says_what_was_offered(offered: bytes, said: str) -> None:
    record = Record("/v1/completions", 0.0, "id", "pull", "done", "ok", 200, usage=TOLD)
    record.prefiller, record.decoder, record.transfer_params = "p:1", "d:1", offered
    record.tokens = tokens_of(record)
    line = AccessLine(record, 0.0).short()
    assert said in line
    assert said or "offered" not in line


def test_a_failure_is_told_in_one_short_line() -> None:
    record = Record("/v1/completions", 10.0, "id", outcome="failed", status=502, ended=10.0)
    record.error, record.stage = "EngineError: it\nsaid no", "prefill"
    assert AccessLine(record, 0.0).short() == (
        "502 completions; failed at prefill; EngineError: it said no"
    )


@pytest.mark.parametrize("many", [1, 65])
def test_equal_headers_give_equal_lines_and_another_request_id(many: int) -> None:
    given = [(b"x-a", b"1")] * many
    assert messages.header_lines(given) == messages.header_lines(list(given))
    assert messages.header_lines(given) == b"x-a: 1\r\n" * many
    assert read_request_id(given) != read_request_id(given)
