"""Endpoints other than generation: one engine answers, and the router passes both bodies on.

An engine that lacks such an endpoint answers 404, which the client gets. The router reads the model
from the body. It removes the fields of a JSON body that clients may not send, and leaves a form as
it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from router.openai.errors import BadRequestError
from router.proxy.gateway import Gateway
from router.proxy.internal_fields import is_internal_in_form
from router.proxy.request import MAX_MODEL_CHARS, PASSED, Request, check_form, read_request

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
    "/v1/chat/completions/render",
    "/v1/chat/completions/derender",
    "/v1/completions/render",
    "/v1/completions/derender",
    "/v1/messages/render",
    "/v1/responses/render",
    "/v1/chat/completions/batch",
    "/v2/embed",
    "/cohere/v2/chat",
    "/generative_scoring",
)
FORM_PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")
BOUNDARY = re.compile(rb'boundary=(?:"([^"\r\n]{1,70})"|([^\s;,"]{1,70}))', re.IGNORECASE)
BOUNDARIES = re.compile(rb"boundary[\d*]*[ \t]*=", re.IGNORECASE)
PARAMETER = rb';[ \t]*([\w*-]+)=("(?:[^"\\]|\\.)*"|[^\s;"\\]*)[ \t]*'
PARAMETERS = re.compile(PARAMETER)
DISPOSITION = re.compile(rb"form-data[ \t]*(?:%b)*;?" % PARAMETER, re.IGNORECASE)
LINE_BREAKS = re.compile(rb"^[ \t]|[\r\n]")
# Limits of a form. Engines on Starlette accept as many fields, and as many files.
MAX_FORM_FIELDS = 1000
MAX_FIELD_HEAD_BYTES = 4096


async def read_json(request: Request, gateway: Gateway) -> None:
    """Read the JSON body of a passed request. Raises BadRequestError, NoModelError,
    UnsupportedTypeError."""
    read_request(request, gateway.limits, None, gateway.aliases)
    request.decode_only_reason, request.threshold = PASSED, 0.0


async def read_form(request: Request, gateway: Gateway) -> None:
    """Read the model from a form. Raises BadRequestError, NoModelError, UnsupportedTypeError."""
    exchange = request.exchange
    check_form(exchange.headers)
    kind = dict(exchange.headers)[b"content-type"]
    found = BOUNDARY.search(kind)
    if found is None or len(BOUNDARIES.findall(kind)) > 1:
        raise BadRequestError("multipart/form-data without a boundary, or with several")
    form = exchange.body
    if not gateway.limits.trust_client_kv_params:
        form = _without_internal_fields(form, found[1] or found[2])
    span = find_model_in_form(form, found[1] or found[2])
    start, end = span or (0, 0)
    given = {} if span is None else {"model": form[start:end].decode("utf-8", "replace")}
    request.body = gateway.aliases.resolve(given, exchange.caller)
    if span is not None and request.body is not given:
        request.alias = given["model"]
        form = form[:start] + request.body["model"].encode() + form[end:]
    if "model" in request.body:
        request.model = request.record.model = request.body["model"]
    request.decode_only_reason, request.form, request.form_body = PASSED, kind, form


def find_model_in_form(form: bytes, boundary: bytes) -> tuple[int, int] | None:
    """Return where the value of the field `model` begins and ends, or None if the form has no such
    field.

    Raises BadRequestError for a form that an engine might parse in another way: the router checks
    the API key's permission for this model.
    """
    found = [(start, end) for name, _, start, end in _fields(form, boundary) if name == b"model"]
    if len(found) > 1:
        raise _ambiguous_form("several fields are called model")
    start, end = found[0] if found else (0, MAX_MODEL_CHARS + 1)
    return None if end - start > MAX_MODEL_CHARS else (start, end)


def _without_internal_fields(form: bytes, boundary: bytes) -> bytes:
    """Return the form without the fields that clients may not send. Raises BadRequestError."""
    kept: list[bytes] = []
    at = 0
    for name, begin, start, end in _fields(form, boundary):
        if name is not None and is_internal_in_form(name, form[start:end]):
            kept.append(form[at:begin])
            at = end
    # A line end before the first boundary is left if the first field goes.
    return b"".join([*kept, form[at:]]).removeprefix(b"\r\n") if at else form


def _fields(form: bytes, boundary: bytes) -> Iterator[tuple[bytes | None, int, int, int]]:
    """Yield for each field its name, and the offsets of its boundary and of its value's start and
    end. Raises BadRequestError."""
    line = b"\r\n--" + boundary
    at = -2 if form.startswith(line[2:]) else form.find(line)
    if at == -1:
        return
    for _ in range(MAX_FORM_FIELDS + 1):
        start = at + len(line)
        after = form[start : start + 2]
        if after in (b"--", b""):  # the end of the form
            return
        if after != b"\r\n":
            raise _ambiguous_form("unexpected bytes follow a boundary")
        end = form.find(b"\r\n\r\n", start, start + MAX_FIELD_HEAD_BYTES)
        if end < 0:
            raise _ambiguous_form(
                f"the head of a field is longer than {MAX_FIELD_HEAD_BYTES} bytes"
            )
        begin, at = max(at, 0), form.find(line, end + 2)
        if at < 0:
            raise _ambiguous_form("the closing boundary is missing")
        yield _name_in(form[start + 2 : end]), begin, end + 4, at
    raise _ambiguous_form(f"there are more than {MAX_FORM_FIELDS} fields")


def _name_in(head: bytes) -> bytes | None:
    """Return the name in the head of a field. Raises BadRequestError."""
    lines = head.split(b"\r\n")
    parts = [line.partition(b":") for line in lines]
    found = [value.strip() for name, _, value in parts if name.lower() == b"content-disposition"]
    is_plain = not any(LINE_BREAKS.search(line) for line in lines)
    if not is_plain or len(found) != 1 or not DISPOSITION.fullmatch(found[0]):
        raise _ambiguous_form("a field needs one simple Content-Disposition")
    options = ((name.lower(), value) for name, value in PARAMETERS.findall(found[0]))
    named = [(name, value) for name, value in options if name.startswith(b"name")]
    if not named:
        return None
    kind, name = named[0]
    if len(named) > 1 or kind != b"name" or b"\\" in name:
        raise _ambiguous_form("a field needs one simple name")
    return bytes(name.strip(b'"'))


def _ambiguous_form(why: str) -> BadRequestError:
    return BadRequestError(f"the form is ambiguous: {why}")
