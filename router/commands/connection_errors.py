"""Why a server does not answer, in the words of all commands: "URL: connection refused"."""

from __future__ import annotations

import os
import re
import socket
import ssl
from collections.abc import Iterator

import httpx

from router.commands.bench.load import CLOSED
from router.http_client.errors import AnswerTimeoutError

# asyncio has the numbers of several failures in a text alone.
ERROR_NUMBER = re.compile(r"\[Errno (\d+)\]")


def no_answer(url: str, cause: BaseException | None, timeout_s: float) -> str:
    """Return why `url` has not answered: `cause`, or None if it had `timeout_s` seconds for it."""
    return f"{url}: {reason_of(cause, timeout_s)}"


def reason_of(cause: BaseException | None, timeout_s: float) -> str:
    """Return the reason alone, for a line that has the URL already."""
    late = f"no answer in {timeout_s:g} s"
    if cause is None:
        return late
    for error in _linked(cause):
        if isinstance(error, socket.gaierror | UnicodeError):
            return "the name cannot be resolved"
        if isinstance(error, ssl.SSLError):
            why = getattr(error, "verify_message", "") or getattr(error, "reason", "") or error
            return f"no TLS connection: {' '.join(str(why).split()).lower()}"
        number = error.errno if isinstance(error, OSError) else None
        if number is None and (found := ERROR_NUMBER.search(str(error))):
            number = int(found[1])
        if number is not None:
            return os.strerror(number).lower()
        if isinstance(error, TimeoutError | httpx.TimeoutException | AnswerTimeoutError):
            return late
    if isinstance(cause, httpx.RemoteProtocolError | httpx.ReadError):
        return CLOSED
    return " ".join(str(cause).split()) or type(cause).__name__


def _linked(error: BaseException) -> Iterator[BaseException]:
    """Yield what raised the error, the innermost first: that knows the reason."""
    inner = error.__cause__ or error.__context__
    if inner is not None:
        yield from _linked(inner)
    for one in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
        yield from _linked(one)
    yield error
