"""A head that comes again: who keeps a connection says the same in front of each message.

What was parsed once is not parsed again: the same bytes mean the same. Only the digits of a
Content-Length may be others, and only a message that is all there is, and all here, is compared.
So nothing is taken that the parser did not take before, and nothing is read differently. The
length is not among the headers of what is all here, for its body tells it: they are the very same.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from typing import Generic, TypeVar

Header = tuple[bytes, bytes]
Headers = Sequence[Header]
T = TypeVar("T")
LENGTH = b"content-length"
DIGITS = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,15})\r\n", re.IGNORECASE)
# Of a head that is remembered: a connection may be idle for long.
MOST_BYTES = 4096
# Heads in a row that were not those before: each has something of its own, so it is not tried on.
MOST_NEW = 8
NOTHING = b"\0"  # which no bytes of that length are, for it is none
# A body and the digits of its length: from how many bytes on these are two, three, and so on.
LONGER = tuple(10 ** (digits - 1) + digits for digits in range(2, 16))


class Repeated(Generic[T]):
    """The last head of a connection, and what its first line said."""

    __slots__ = ("_before", "_behind", "_end", "_head", "_headers", "_new", "_said",
                 "_size")  # fmt: skip

    def __init__(self, nothing: T) -> None:
        self._before = self._behind = b""
        # The head of a message of this size, and how long it is: many in a row have one size.
        self._head, self._end, self._size = NOTHING, 0, -1
        self._headers: Headers = ()
        self._said = nothing
        self._new = 0

    def read(self, data: bytes) -> tuple[T, Headers, bytes] | None:
        """A message with the same head, that begins and ends with `data`: what its first line says,
        its headers, and its body."""
        if len(data) != self._size:
            self._fit(len(data))
        end = self._end
        if data[:end] != self._head:
            return None
        self._new = 0
        return self._said, self._headers, data[end:]

    def _fit(self, size: int) -> None:
        """The head that a message of this size would have."""
        self._size = size
        if not self._before:
            return  # nothing is remembered
        body = size - len(self._before) - len(self._behind)
        body -= bisect_right(LONGER, body) + 1
        self._head = b"%b%d%b" % (self._before, body, self._behind)
        self._end = len(self._head)

    def note(self, data: bytes, said: T, headers: Headers, size: int) -> None:
        """What was found in `data`, when the parser took all of it for one message with a body of
        this size. Nobody may change these headers any more."""
        if self._new >= MOST_NEW:
            return
        self._new += 1
        end = data.find(b"\n\r\n", 0, MOST_BYTES) + 3
        found = DIGITS.search(data, 0, end)
        if found is None or data.find(b"\n\n", 0, end) >= 0:
            return
        if int(found[1]) == size == len(data) - end:
            self._said, self._headers = said, headers
            self._before, self._behind = data[: found.start(1)], data[found.end(1) : end]
            self._size = -1


def without_length(headers: Headers) -> tuple[Header, ...]:
    """Of a message that is all here; a tuple, for it is looked up by who has seen it before."""
    return tuple([header for header in headers if header[0] != LENGTH])
