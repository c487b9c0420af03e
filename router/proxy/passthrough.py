"""Endpoints that one engine answers alone: their requests are passed to it, and its answer back.

Which of them an engine has is its own matter: its 404 is the answer. A body that is JSON is read
for its model, and loses what a client may not send; a form is not parsed, only searched for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from router.openai.errors import BadRequestError
from router.proxy.gateway import Gateway
from router.proxy.request import PASSED, Request
from router.proxy.request_parser import MAX_MODEL_CHARS, check_form, read_request

JSON_PATHS = (
    "/v1/embeddings",
    "/v1/rerank",
    "/rerank",
    "/v2/rerank",
    "/v1/score",
    "/score",
    "/tokenize",
    "/detokenize",
    "/pooling",
    "/classify",
)
FORM_PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")
BOUNDARY = re.compile(rb'boundary=(?:"([^"\r\n]{1,70})"|([^\s;,"]{1,70}))', re.IGNORECASE)
BOUNDARIES = re.compile(rb"boundary[\d*]*[ \t]*=", re.IGNORECASE)
PARAMETER = rb';[ \t]*([\w*-]+)=("(?:[^"\\]|\\.)*"|[^\s;"\\]*)[ \t]*'
PARAMETERS = re.compile(PARAMETER)
DISPOSITION = re.compile(rb"form-data[ \t]*(?:%b)*;?" % PARAMETER, re.IGNORECASE)
LINE_BREAKS = re.compile(rb"^[ \t]|[\r\n]")
# Of a form: the fields that it may have, and how long the head of one may be.
MAX_FORM_FIELDS = 64
MAX_FIELD_HEAD_BYTES = 4096


async def read_json(request: Request, gateway: Gateway) -> None:
    """Raises BadRequestError, UnsupportedTypeError."""
    read_request(request, gateway.limits, None)
    request.alone, request.threshold = PASSED, 0.0


async def read_form(request: Request, _: Gateway) -> None:
    """Raises BadRequestError, UnsupportedTypeError."""
    exchange = request.exchange
    check_form(exchange.headers)
    kind = dict(exchange.headers)[b"content-type"]
    found = BOUNDARY.search(kind)
    if found is None or len(BOUNDARIES.findall(kind)) > 1:
        raise BadRequestError("multipart/form-data without a boundary, or with several")
    model = model_of_form(exchange.body, found[1] or found[2])
    if model is not None:
        request.body = {"model": model}
        request.record.model = model
    request.alone, request.form = PASSED, kind


def model_of_form(form: bytes, boundary: bytes) -> str | None:
    """Of the field `model`. Raises BadRequestError for a form that an engine might read in another
    way: whose model that is was asked of its key."""
    found = [form[start:end] for name, start, end in _fields(form, boundary) if name == b"model"]
    if len(found) > 1:
        raise _ambiguous_form("several fields are called model")
    value = found[0] if found else None
    if value is None or len(value) > MAX_MODEL_CHARS:
        return None
    return value.decode("utf-8", "replace")


def _fields(form: bytes, boundary: bytes) -> Iterator[tuple[bytes | None, int, int]]:
    """Their names, and where their values begin and end. Raises BadRequestError."""
    line = b"\r\n--" + boundary
    at = -2 if form.startswith(line[2:]) else form.find(line)
    if at == -1:
        return
    for _ in range(MAX_FORM_FIELDS + 1):
        start = at + len(line)
        after = form[start : start + 2]
        if after in (b"--", b""):  # the end of it all
            return
        if after != b"\r\n":
            raise _ambiguous_form("something follows a boundary")
        end = form.find(b"\r\n\r\n", start, start + MAX_FIELD_HEAD_BYTES)
        if end < 0:
            raise _ambiguous_form(
                f"the head of a field is longer than {MAX_FIELD_HEAD_BYTES} bytes"
            )
        at = form.find(line, end + 2)
        if at < 0:
            raise _ambiguous_form("it has no end")
        yield _name_in(form[start + 2 : end]), end + 4, at
    raise _ambiguous_form(f"there are more than {MAX_FORM_FIELDS} fields")


def _name_in(head: bytes) -> bytes | None:
    """Raises BadRequestError."""
    lines = head.split(b"\r\n")
    parts = [line.partition(b":") for line in lines]
    said = [value.strip() for name, _, value in parts if name.lower() == b"content-disposition"]
    is_plain = not any(LINE_BREAKS.search(line) for line in lines)
    if not is_plain or len(said) != 1 or not DISPOSITION.fullmatch(said[0]):
        raise _ambiguous_form("a field has no Content-Disposition that is plain")
    options = ((name.lower(), value) for name, value in PARAMETERS.findall(said[0]))
    named = [(name, value) for name, value in options if name.startswith(b"name")]
    if not named:
        return None
    kind, name = named[0]
    if len(named) > 1 or kind != b"name" or b"\\" in name:
        raise _ambiguous_form("the name of a field is not plain")
    return bytes(name.strip(b'"'))


def _ambiguous_form(why: str) -> BadRequestError:
    return BadRequestError(f"the form can be read in more than one way: {why}")
