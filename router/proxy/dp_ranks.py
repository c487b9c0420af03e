"""Data-parallel ranks of one engine, behind one address: a header says which of them is meant."""

from __future__ import annotations

from router.proxy.request import Request

RANK = b"x-data-parallel-rank"


def chosen(request: Request) -> bytes | None:
    """By the client. It then holds for both legs, and nobody chooses another."""
    return next((value for name, value in request.exchange.headers if name == RANK), None)


def line(number: int) -> bytes:
    return b"%s: %d\r\n" % (RANK, number)
