"""What is kept of the latest, so many at most: for what peers can make us remember."""

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def keep_latest(kept: "OrderedDict[K, V]", key: K, value: V, most: int) -> None:
    """`key` is the latest now; what was kept longest ago makes room."""
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > most:
        kept.popitem(last=False)
