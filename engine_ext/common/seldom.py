"""Log lines that a peer can provoke: some of each kind in a while, then how many were held back."""

import logging
from dataclasses import dataclass

LIMIT = 20
SECONDS = 60.0
MAX_KINDS = 256


@dataclass(slots=True)
class _Kind:
    since: float
    count: int = 0


class Seldom(logging.Filter):
    """Of each kind of line (what is logged before its arguments are filled in), `limit` in
    `seconds`; the first one after that says how many are missing. For one logger:
    `logger.addFilter(Seldom())`."""

    def __init__(self, limit: int = LIMIT, seconds: float = SECONDS) -> None:
        super().__init__()
        self._limit = limit
        self._seconds = seconds
        self._kinds: dict[str, _Kind] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        name = str(record.msg)
        kind = self._kinds.get(name)
        if kind is None or record.created - kind.since >= self._seconds:
            self._begin(name, record, 0 if kind is None else kind.count - self._limit)
            return True
        kind.count += 1
        return kind.count <= self._limit

    def clear(self) -> None:
        self._kinds.clear()

    def _begin(self, name: str, record: logging.LogRecord, held_back: int) -> None:
        self._kinds.pop(name, None)
        if len(self._kinds) >= MAX_KINDS:
            del self._kinds[next(iter(self._kinds))]
        self._kinds[name] = _Kind(record.created, 1)
        if held_back > 0:
            record.msg = f"{name} (and {held_back} more like this since)"
