"""What a client sends becomes requests, without a socket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from router.openai.errors import (
    BodyTooLargeError,
    HeadTooLargeError,
    MalformedRequestError,
    OverloadError,
    RequestTimeoutError,
    UnauthorizedError,
    shape_of,
)
from router.proxy.admission import Held
from router.server.proxied_endpoints import CHAT, COMPLETIONS
from router.server.request_reader import Inbound, Incoming

BODY = b'{"prompt":"a"}'


@dataclass
class Bounded:
    limits: Any = field(
        default_factory=lambda: SimpleNamespace(max_header_size=1000, max_body_size=100)
    )
    held: Held = field(default_factory=lambda: Held(150))
    refusal: UnauthorizedError | None = None

    def refusal_of(
        self, headers: Sequence[tuple[bytes, bytes]], endpoint: str | None
    ) -> UnauthorizedError | None:
        return self.refusal


def post(
    target: bytes = b"/v1/completions", body: bytes = BODY, more: bytes = b"", host: bytes = b"r"
) -> bytes:
    head = b"POST %s HTTP/1.1\r\nhost: %s\r\ncontent-length: %d\r\n%s\r\n"
    return head % (target, host, len(body), more) + body


def taken(inbound: Inbound) -> Incoming:
    request = inbound.requests.popleft()
    inbound.let_go(request)
    return request


def test_a_request_is_the_same_in_one_piece_and_byte_by_byte() -> None:
    whole, pieces = Inbound(Bounded()), Inbound(Bounded())
    sent = post(more=b"X-Two: 2\r\n")
    whole.feed(sent)
    for at in range(len(sent)):
        assert not any(request.is_complete for request in pieces.requests)
        pieces.feed(sent[at : at + 1])
    for inbound in (whole, pieces):
        (request,) = inbound.requests
        assert (request.endpoint, request.method, request.body) == (COMPLETIONS, b"POST", BODY)
        assert request.headers[-1] == (b"x-two", b"2")
        assert request.is_complete
        assert request.keep_alive
        assert not inbound.is_receiving


@pytest.mark.parametrize(
    ("target", "endpoint"),
    [
        (b"/v1/chat/completions", CHAT),
        (b"/v1/chat/completions?api-version=1", CHAT),
        (b"/v1/chat/completions/", CHAT),
        (b"/v1/completions/?a#b", COMPLETIONS),
        (b"http://router:80/v1/completions", COMPLETIONS),
        (b"http://router/v1/completions/?a=/v1/chat/completions", COMPLETIONS),
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
    inbound = Inbound(Bounded())
    inbound.feed(post(target))
    (request,) = inbound.requests
    assert request.endpoint == endpoint
    assert request.refusal is None


def test_other_methods_are_for_the_application() -> None:
    inbound = Inbound(Bounded())
    inbound.feed(post().replace(b"POST", b"PUT"))
    assert inbound.requests[0].endpoint is None


@pytest.mark.parametrize("count", [0, 2])
def test_a_request_has_one_host(count: int) -> None:
    inbound = Inbound(Bounded())
    inbound.feed(post().replace(b"host: r\r\n", b"host: r\r\n" * count))
    assert isinstance(inbound.requests[0].refusal, MalformedRequestError)
    assert inbound.is_deaf


@pytest.mark.parametrize(
    "codings", [b"gzip, chunked", b"x, chunked", b"gzip\r\ntransfer-encoding: chunked"]
)
def test_a_body_in_a_coding_that_is_not_known_is_not_taken_for_one_without(codings: bytes) -> None:
    inbound = Inbound(Bounded())
    head = b"POST /v1/completions HTTP/1.1\r\nhost: r\r\ntransfer-encoding: %s\r\n\r\n" % codings
    inbound.feed(head + b"2\r\n{}\r\n0\r\n\r\n")
    (request,) = inbound.requests
    assert request.refusal is not None
    assert shape_of(request.refusal).status == 501
    assert inbound.is_deaf


@pytest.mark.parametrize("coding", [b"chunked", b"Chunked ", b"\tchunked"])
def test_chunked_may_be_spelled_in_any_way(coding: bytes) -> None:
    inbound = Inbound(Bounded())
    head = b"POST /v1/completions HTTP/1.1\r\nhost: r\r\ntransfer-encoding:%s\r\n\r\n" % coding
    inbound.feed(head + b"2\r\n{}\r\n0\r\n\r\n")
    assert inbound.requests[0].refusal is None
    assert inbound.requests[0].body == b"{}"


def test_an_old_client_needs_no_host_and_is_served_once() -> None:
    inbound = Inbound(Bounded())
    inbound.feed(
        post(more=b"connection: keep-alive\r\n")
        .replace(b"host: r\r\n", b"")
        .replace(b"1.1", b"1.0")
    )
    (request,) = inbound.requests
    assert request.refusal is None
    assert not request.keep_alive
    assert inbound.is_deaf


def test_what_follows_a_last_request_is_not_listened_to() -> None:
    inbound = Inbound(Bounded())
    inbound.feed(post(more=b"connection: close\r\n") + post())
    (request,) = inbound.requests
    assert request.is_complete
    assert not request.keep_alive
    assert request.refusal is None
    assert inbound.is_deaf


def test_a_body_that_grows_too_large_is_the_last_that_is_listened_to() -> None:
    bounded = Bounded()
    inbound = Inbound(bounded)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: r\r\ntransfer-encoding: chunked\r\n\r\n"
    inbound.feed(head + b"50\r\n" + b"x" * 0x50 + b"\r\n")
    assert bounded.held.size == 0x50
    inbound.feed(b"50\r\n" + b"x" * 0x50 + b"\r\n0\r\n\r\n" + post())
    (request,) = inbound.requests
    assert isinstance(request.refusal, BodyTooLargeError)
    assert not request.keep_alive
    assert inbound.is_deaf
    assert bounded.held.size == 0


def test_an_announced_size_is_refused_before_it_comes() -> None:
    inbound = Inbound(Bounded())
    inbound.feed(post(body=b"x" * 101)[:-60])
    assert isinstance(inbound.requests[0].refusal, BodyTooLargeError)


def test_bodies_of_all_requests_have_one_bound() -> None:
    bounded = Bounded()
    one, other = Inbound(bounded), Inbound(bounded)
    one.feed(post(body=b"x" * 80))
    other.feed(post(body=b"x" * 80)[:-10])
    assert isinstance(other.requests[0].refusal, OverloadError)
    assert bounded.held.size == 80
    taken(one)
    assert bounded.held.size == 0
    Inbound(bounded).feed(post(body=b"x" * 80))
    assert bounded.held.size == 80


def test_nothing_is_held_for_a_connection_that_has_closed() -> None:
    bounded = Bounded()
    inbound = Inbound(bounded)
    inbound.feed(post() + post()[:-5])
    assert bounded.held.size == 2 * len(BODY) - 5
    inbound.close()
    assert bounded.held.size == 0
    assert not inbound.requests
    inbound.feed(post())
    assert not inbound.requests


@pytest.mark.parametrize("sent", [b"x: " + b"y" * 1000, b"x: y\r\n" * 200])
def test_a_head_has_a_bound(sent: bytes) -> None:
    for rest in (b"", b"\r\n\r\n"):
        inbound = Inbound(Bounded())
        inbound.feed(b"POST /v1/completions HTTP/1.1\r\nhost: r\r\n" + sent + rest)
        assert isinstance(inbound.requests[-1].refusal, HeadTooLargeError)


def test_noise_behind_a_request_is_told_from_a_request_that_is_cut_off() -> None:
    noisy, cut = Inbound(Bounded()), Inbound(Bounded())
    noisy.feed(post() + b"\x00noise\r\n\r\n")
    cut.feed(post() + post()[:-3])
    cut.refuse(RequestTimeoutError("late"))
    for inbound in (noisy, cut):
        first = inbound.requests.popleft()
        assert first.is_complete
        assert first.refusal is None
        assert inbound.requests[0].refusal is not None
    assert noisy.is_noise
    assert not cut.is_noise


def test_a_request_to_upgrade_is_a_plain_request() -> None:
    inbound = Inbound(Bounded())
    inbound.feed(post(more=b"connection: upgrade\r\nupgrade: h2c\r\n") + post(b"/v1/models"))
    first, second = inbound.requests
    assert (first.endpoint, first.body) == (COMPLETIONS, BODY)
    assert b"upgrade" not in dict(first.headers)
    assert second.target == b"/v1/models"
    assert second.is_complete


def test_a_client_may_wait_for_a_word() -> None:
    inbound = Inbound(Bounded())
    sent = post(more=b"Expect: 100-Continue\r\n")
    inbound.feed(sent[: -len(BODY)])
    (request,) = inbound.requests
    assert request.expects_continue
    assert not request.is_complete


def test_a_strangers_body_is_not_waited_for() -> None:
    bounded = Bounded(refusal=UnauthorizedError(is_missing=True))
    inbound = Inbound(bounded)
    inbound.feed(post()[:-5])
    (request,) = inbound.requests
    assert isinstance(request.refusal, UnauthorizedError)
    assert bounded.held.size == 0
