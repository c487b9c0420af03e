"""When a certificate ends: read out of its PEM, for the standard library tells that of no
certificate of one's own.

RFC 5280, 4.1. Only what was loaded as a certificate is read, so what is odd is None.
"""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime
from typing import NamedTuple

PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
VERSION, UTC_TIME, GENERALIZED_TIME = 0xA0, 0x17, 0x18
# UTCTime has two digits of a year.
CENTURY = 50


class Element(NamedTuple):
    tag: int
    content: bytes
    rest: bytes


def end_of(chain: bytes) -> float | None:
    """Unix time. Of a chain it is the first, which is the server's own."""
    found = PEM.search(chain)
    try:
        return None if found is None else _end(ssl.PEM_cert_to_DER_cert(found[0].decode("ascii")))
    except (ValueError, IndexError):
        return None


def _end(der: bytes) -> float | None:
    """Raises ValueError, IndexError."""
    left = _element(_element(der).content).content
    if left[0] == VERSION:
        left = _element(left).rest
    for _ in ("serial number", "signature", "issuer"):
        left = _element(left).rest
    begins = _element(_element(left).content)
    ends = _element(begins.rest)
    return _moment(ends.tag, ends.content.decode("ascii"))


def _element(der: bytes) -> Element:
    """Raises IndexError."""
    size, start = der[1], 2
    if size & 0x80:
        start += size & 0x7F
        size = int.from_bytes(der[2:start])
    return Element(der[0], der[start : start + size], der[start + size :])


def _moment(tag: int, text: str) -> float | None:
    """Raises ValueError."""
    if tag == UTC_TIME:
        text = ("20" if int(text[:2]) < CENTURY else "19") + text
    elif tag != GENERALIZED_TIME:
        return None
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
