"""Endpoints that one engine answers alone: their requests are passed to it, and its answer back.

Which of them an engine has is its own matter: its 404 is the answer. A body that is JSON is read
for its model, and loses what a client may not send; a form is not parsed, only searched for it.
"""

from __future__ import annotations

import re

from router.flows.content import check_form
from router.flows.errors import BadRequestError
from router.flows.gateway import Gateway
from router.flows.request import LONGEST_NAME, PASSED, Request

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
MODEL = re.compile(rb'content-disposition:[^\r\n]*[; ]name="?model"?(?:;|\s*$)', re.I | re.M)
# Of a form: the fields that are looked at, and how long the head of one is.
MOST_FIELDS = 64
LONGEST_HEAD = 1024


async def read_json(request: Request, gateway: Gateway) -> None:
    """Raises BadRequestError, UnsupportedTypeError."""
    request.read(gateway.limits, None)
    request.alone, request.threshold = PASSED, 0.0


async def read_form(request: Request, _: Gateway) -> None:
    """Raises BadRequestError, UnsupportedTypeError."""
    exchange = request.exchange
    check_form(exchange.headers)
    kind = dict(exchange.headers)[b"content-type"]
    found = BOUNDARY.search(kind)
    if found is None:
        raise BadRequestError("multipart/form-data without a boundary")
    model = model_in(exchange.body, found[1] or found[2])
    if model is not None:
        request.body = {"model": model}
        request.record.model = model
    request.alone, request.form = PASSED, kind


def model_in(form: bytes, boundary: bytes) -> str | None:
    """Of the field `model`, where it is one of the first. Never more than heads are looked at."""
    line, start = b"--" + boundary, 0
    for _ in range(MOST_FIELDS):
        start = form.find(line, start)
        if start < 0:
            return None
        start += len(line)
        end = form.find(b"\r\n\r\n", start, start + LONGEST_HEAD)
        if end >= 0 and MODEL.search(form, start, end):
            value = form[end + 4 : form.find(b"\r\n" + line, end + 2)]
            return value.decode("utf-8", "replace") if len(value) <= LONGEST_NAME else None
    return None
