"""The bytes of a client become requests, without a socket."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from router.http_client.answer_limits import MemoryBudget
from router.openai.anthropic_messages import MESSAGES_PATH
from router.openai.errors import (
    BodyTooLargeError,
    HeadTooLargeError,
    MalformedRequestError,
    OverloadError,
    RequestTimeoutError,
    UnauthorizedError,
    shape_of,
)
from router.proxy.gateway import MemoryLimits
from router.server.dialect_exchange import CHAT_PATH
from router.server.proxied_endpoints import COMPLETIONS_PATH
from router.server.request_reader import IncomingRequest, RequestReader

BODY = b'{"prompt":"a"}'


@dataclass
class Bounded:
    limits: Any = field(
        default_factory=lambda: SimpleNamespace(max_header_size=1000, max_body_size=100)
    )
    memory: MemoryLimits = field(
        default_factory=lambda: MemoryLimits(MemoryBudget(150), MemoryBudget(0), MemoryBudget(0))
    )
    caller: str | None = None

    def identify(self, headers: Sequence[tuple[bytes, bytes]]) -> str | None:
        return self.caller


def reader_of(bounds: Any) -> RequestReader:
    return RequestReader(bounds)


def framed(target: bytes = b"/v1/completions", body: bytes = BODY, more: bytes = b"") -> bytes:
    head = b"POST %s HTTP/1.1\r\nhost: r\r\ncontent-length: %d\r\n%s\r\n"
    return head % (target, len(body), more) + body


def taken(reader: RequestReader) -> IncomingRequest:
    request = reader.requests.popleft()
    reader.release_body(request)
    return request


def test_a_request_is_the_same_in_one_piece_and_byte_by_byte() -> None:
    whole, pieces = reader_of(Bounded()), reader_of(Bounded())
    sent = framed(more=b"X-Two: 2\r\n")
    whole.feed(sent)
    for at in range(len(sent)):
        assert not any(request.is_complete for request in pieces.requests)
        pieces.feed(sent[at : at + 1])
    for reader in (whole, pieces):
        (request,) = reader.requests
        assert (request.endpoint, request.method, request.body) == (COMPLETIONS_PATH, b"POST", BODY)
        assert request.headers[-1] == (b"x-two", b"2")
        assert request.is_complete
        assert request.keep_alive
        assert not reader.is_receiving


@pytest.mark.parametrize("by_byte", [False, True])
@pytest.mark.parametrize("target", [b"/v1/completions", b"/v1/models"])
def test_trailers_do_not_become_headers(by_byte: bool, target: bytes) -> None:
    reader = reader_of(Bounded())
    sent = _chunked(target, b"x-tenant: a\r\nAuthorization: Bearer k\r\n")
    for at in range(len(sent)) if by_byte else ():
        reader.feed(sent[at : at + 1])
    if not by_byte:
        reader.feed(sent + framed())  # the next request has its own headers
    request = reader.requests[0]
    assert (request.is_complete, request.body) == (True, BODY)
    assert [name for name, _ in request.headers] == [b"host", b"transfer-encoding"]


@pytest.mark.parametrize("lines", [b"x: " + b"y" * 1100 + b"\r\n", b"x: y\r\n" * 200])
@pytest.mark.parametrize("piece", [100_000, 7])
def test_trailers_are_limited_as_a_head_is(lines: bytes, piece: int) -> None:
    reader, sent = reader_of(Bounded()), _chunked(b"/v1/completions", lines) + framed()
    for at in range(0, len(sent), piece):
        reader.feed(sent[at : at + piece])
    (request,) = reader.requests
    assert isinstance(request.refusal, HeadTooLargeError)
    assert reader.is_closed


def _chunked(target: bytes, trailers: bytes) -> bytes:
    head = b"POST %s HTTP/1.1\r\nhost: r\r\ntransfer-encoding: chunked\r\n\r\n" % target
    return b"%b%x\r\n%b\r\n0\r\n%b\r\n" % (head, len(BODY), BODY, trailers)


@pytest.mark.parametrize(
    ("target", "endpoint"),
    [
        (b"/v1/chat/completions", CHAT_PATH),
        (b"/v1/chat/completions?api-version=1", CHAT_PATH),
        (b"/v1/chat/completions/", CHAT_PATH),
        (b"/v1/completions/?a#b", COMPLETIONS_PATH),
        (b"http://router:80/v1/completions", COMPLETIONS_PATH),
        (b"http://router/v1/completions/?a=/v1/chat/completions", COMPLETIONS_PATH),
        (b"/v1/%63hat/completions", CHAT_PATH),
        (b"/v1/messages", MESSAGES_PATH),
        (b"/v1/embeddings?a=b", "/v1/embeddings"),
        (b"/v1/embeddings/", None),
        (b"/v1/completions//", None),
        (b"//v1/completions", None),
        (b"/v1/models", None),
        (b"/?/v1/completions", None),
        (b"*", None),
    ],
)
def test_every_spelling_of_an_endpoint_is_that_endpoint(
    target: bytes, endpoint: str | None
) -> None:
    reader = reader_of(Bounded())
    reader.feed(framed(target))
    (request,) = reader.requests
    assert request.endpoint == endpoint
    assert request.refusal is None


def test_other_methods_are_for_the_application() -> None:
    reader = reader_of(Bounded())
    reader.feed(framed().replace(b"POST", b"PUT"))
    assert reader.requests[0].endpoint is None


@pytest.mark.parametrize("count", [0, 2])
def test_a_request_has_one_host(count: int) -> None:
    reader = reader_of(Bounded())
    reader.feed(framed().replace(b"host: r\r\n", b"host: r\r\n" * count))
    assert isinstance(reader.requests[0].refusal, MalformedRequestError)
    assert reader.is_closed


@pytest.mark.parametrize(
    "codings", [b"gzip, chunked", b"x, chunked", b"gzip\r\ntransfer-encoding: chunked"]
)
def test_a_body_in_a_coding_that_is_not_known_is_not_taken_for_one_without(codings: bytes) -> None:
    reader = reader_of(Bounded())
    head = b"POST /v1/completions HTTP/1.1\r\nhost: r\r\ntransfer-encoding: %s\r\n\r\n" % codings
    reader.feed(head + b"2\r\n{}\r\n0\r\n\r\n")
    (request,) = reader.requests
    assert request.refusal is not None
    assert shape_of(request.refusal).status == 501
    assert reader.is_closed


@pytest.mark.parametrize("coding", [b"chunked", b"Chunked ", b"\tchunked"])
def test_chunked_may_be_spelled_in_any_way(coding: bytes) -> None:
    reader = reader_of(Bounded())
    head = b"POST /v1/completions HTTP/1.1\r\nhost: r\r\ntransfer-encoding:%s\r\n\r\n" % coding
    reader.feed(head + b"2\r\n{}\r\n0\r\n\r\n")
    assert reader.requests[0].refusal is None
    assert reader.requests[0].body == b"{}"


def test_an_old_client_needs_no_host_and_is_served_once() -> None:
    reader = reader_of(Bounded())
    reader.feed(
        framed(more=b"connection: keep-alive\r\n")
        .replace(b"host: r\r\n", b"")
        .replace(b"1.1", b"1.0")
    )
    (request,) = reader.requests
    assert request.refusal is None
    assert not request.keep_alive
    assert reader.is_closed


def test_what_follows_a_last_request_is_not_listened_to() -> None:
    reader = reader_of(Bounded())
    reader.feed(framed(more=b"connection: close\r\n") + framed())
    (request,) = reader.requests
    assert request.is_complete
    assert not request.keep_alive
    assert request.refusal is None
    assert reader.is_closed


def test_a_body_that_grows_too_large_is_the_last_that_is_listened_to() -> None:
    bounded = Bounded()
    reader = reader_of(bounded)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: r\r\ntransfer-encoding: chunked\r\n\r\n"
    reader.feed(head + b"50\r\n" + b"x" * 0x50 + b"\r\n")
    assert bounded.memory.bodies.size == 0x50
    reader.feed(b"50\r\n" + b"x" * 0x50 + b"\r\n0\r\n\r\n" + framed())
    (request,) = reader.requests
    assert isinstance(request.refusal, BodyTooLargeError)
    assert not request.keep_alive
    assert reader.is_closed
    assert bounded.memory.bodies.size == 0


def test_bodies_of_all_requests_have_one_bound() -> None:
    bounded = Bounded()
    one, other = reader_of(bounded), reader_of(bounded)
    one.feed(framed(body=b"x" * 80))
    other.feed(framed(body=b"x" * 80)[:-10])
    assert isinstance(other.requests[0].refusal, OverloadError)
    assert bounded.memory.bodies.size == 80
    taken(one)
    assert bounded.memory.bodies.size == 0
    reader_of(bounded).feed(framed(body=b"x" * 80))
    assert bounded.memory.bodies.size == 80


def test_nothing_is_held_for_a_connection_that_has_closed() -> None:
    bounded = Bounded()
    reader = reader_of(bounded)
    reader.feed(framed() + framed()[:-5])
    assert bounded.memory.bodies.size == 2 * len(BODY) - 5
    reader.close()
    assert bounded.memory.bodies.size == 0
    assert not reader.requests
    reader.feed(framed())
    assert not reader.requests


def test_noise_behind_a_request_is_told_from_a_request_that_is_cut_off() -> None:
    noisy, cut = reader_of(Bounded()), reader_of(Bounded())
    noisy.feed(framed() + b"\x00noise\r\n\r\n")
    cut.feed(framed() + framed()[:-3])
    cut.refuse(RequestTimeoutError("late"))
    for reader in (noisy, cut):
        first = reader.requests.popleft()
        assert first.is_complete
        assert first.refusal is None
        assert reader.requests[0].refusal is not None
    assert noisy.next_is_invalid
    assert not cut.next_is_invalid


def test_a_strangers_body_is_not_waited_for() -> None:
    bounded = Bounded(caller="missing")
    reader = reader_of(bounded)
    reader.feed(framed()[:-5])
    (request,) = reader.requests
    assert isinstance(request.refusal, UnauthorizedError)
    assert bounded.memory.bodies.size == 0
