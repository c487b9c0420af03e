"""A body must have the Content-Type of what it is."""

import pytest

from router.openai.errors import UnsupportedTypeError
from router.proxy.request import check_form, check_json
from scripts.mock_engine import MockEngine
from tests.unit.router.harness import Router, post

BODY = b'{"model": "m", "prompt": "x"}'


@pytest.mark.parametrize(
    "kind",
    [
        b"text/plain",
        b"text/plain; charset=application/json",
        b"application/x-www-form-urlencoded",
        b"multipart/form-data; boundary=a",
        b"application/jsonp",
        b"application/json-seq",
        b"text/json",
        b"application/json, text/plain",
        b"\xff",
    ],
)
async def test_what_is_no_json_is_refused_before_anybody_works(
    router: Router, p: MockEngine, d: MockEngine, kind: bytes
) -> None:
    async with router.socket() as client:
        await client.send(post(BODY, headers=b"content-type: %s\r\n" % kind))
        head, body = await client.answer()
    assert b" 415 " in head.split(b"\r\n")[0]
    assert b"UnsupportedMediaTypeError" in body
    assert not p.requests
    assert not d.requests


@pytest.mark.parametrize(
    "kind",
    [
        b"application/json",
        b"Application/JSON",
        b"application/json; charset=utf-8",
        b"application/vnd.api+json",
        None,
    ],
)
async def test_json_by_any_of_its_names_is_served(router: Router, kind: bytes | None) -> None:
    line = b"" if kind is None else b"content-type: %s\r\n" % kind
    async with router.socket() as client:
        await client.send(post(BODY, headers=line))
        assert b" 200 " in (await client.answer())[0].split(b"\r\n")[0]


async def test_a_page_must_say_what_it_sends(router: Router, p: MockEngine) -> None:
    """A browser sends a Blob without a type unasked."""
    async with router.socket() as client:
        await client.send(post(BODY, headers=b"origin: https://foreign.example\r\n"))
        head, body = await client.answer()
    assert b" 415 " in head.split(b"\r\n")[0]
    assert b"names no Content-Type" in body
    assert not p.requests


async def test_what_is_as_it_is_may_say_so(router: Router) -> None:
    headers = {"content-encoding": "Identity"}
    answer = await router.client.post("/v1/completions", content=BODY, headers=headers)
    assert answer.status_code == 200


def test_a_form_must_be_one() -> None:
    check_form([(b"content-type", b"Multipart/Form-Data; boundary=x")])
    for kind in (b"application/json", b"text/plain", b""):
        with pytest.raises(UnsupportedTypeError):
            check_form([(b"content-type", kind)])


def test_an_empty_type_is_none() -> None:
    check_json([(b"content-type", b"")])
