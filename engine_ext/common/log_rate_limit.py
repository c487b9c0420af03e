"""A rate limit for log lines that a peer can provoke."""

import logging
from dataclasses import dataclass

LIMIT = 20
SECONDS = 60.0
MAX_KINDS = 256


@dataclass(slots=True)
class _Kind:
    since: float
    count: int = 0


class LogRateLimit(logging.Filter):
    """Pass at most `limit` lines of each kind in `seconds`; the next line then gives the number of
    dropped ones. The kind is the message before its arguments are filled in. Add it to one logger:
    `logger.addFilter(LogRateLimit())`.
    """

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

    def _begin(self, name: str, record: logging.LogRecord, num_dropped: int) -> None:
        self._kinds.pop(name, None)
        if len(self._kinds) >= MAX_KINDS:
            del self._kinds[next(iter(self._kinds))]
        self._kinds[name] = _Kind(record.created, 1)
        if num_dropped > 0:
            record.msg = f"{name} (and {num_dropped} more like this since)"
