"""The keys in force: those of a file, which is watched. One that cannot be used changes nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from router.auth.api_keys import MOST_BYTES, Key, Keys, digest_of, parse
from router.common.watched_file import INTERVAL, UnreadableError, Watched, content_of

logger = logging.getLogger("disagg_router.callers")


class Keyring:
    """`check` raises ValueError for keys that this router cannot serve."""

    def __init__(
        self,
        path: Path,
        check: Callable[[Keys], None] = lambda keys: None,
        interval: float = INTERVAL,
    ) -> None:
        """Raises ValueError for a file that cannot be used."""
        self.path = path
        self.keys: Keys = {}
        self.on_change: Callable[[], None] = lambda: None
        self._check = check
        self.file = Watched((path,), MOST_BYTES, self._take, self._said, interval)

    @staticmethod
    def check_file(path: Path) -> None:
        """Raises ValueError for one that is broken now."""
        try:
            parse(content_of(path, MOST_BYTES))
        except UnreadableError as error:
            raise ValueError(str(error)) from None

    def find(self, key: bytes) -> Key | None:
        return self.keys.get(digest_of(key))

    def _take(self, content: tuple[bytes, ...]) -> None:
        """Raises ValueError."""
        keys = parse(content[0])
        self._check(keys)
        is_first, self.keys = not self.keys, keys
        if not is_first:
            logger.info("%s: %d API keys from now on", self.path, len(keys))
        self.on_change()

    def _said(self, trouble: str) -> None:
        if trouble:
            logger.error("API keys stay as they are: %s: %s", self.path, trouble)
        else:
            logger.info("%s can be used again", self.path)
