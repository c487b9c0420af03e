"""A bounded memory of the latest entries, for what peers can make an engine remember."""

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def keep_latest(kept: "OrderedDict[K, V]", key: K, value: V, most: int) -> None:
    """Store `value` under `key` as the latest entry, and drop the oldest beyond `most` entries."""
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > most:
        kept.popitem(last=False)
