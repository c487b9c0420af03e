"""Of the `n` answers to one prompt one loads what a remote holds, and the others wait for it: a
holder frees its blocks when a reader is done. What was loaded they find in the host's own prefix
cache; where there is none, or the first has ended before, they compute.

Hosts make a request of each answer, `0_cmpl-x`, `1_cmpl-x`, all with the same params.
"""

import re
from collections import OrderedDict

from engine_ext.common.latest import keep_latest

MOST = 4096
"""Families that are remembered: one of them may come when the first has ended."""

_CHILD = re.compile(r"[0-9]+_(.+)", re.DOTALL)


class RequestFamilies:
    def __init__(self) -> None:
        self._first: OrderedDict[str, str] = OrderedDict()
        """Of each family, who came first."""

    def first_of(self, request_id: str) -> str:
        """Itself, where it has no siblings."""
        family = _family_of(request_id)
        return request_id if family is None else self._first.get(family, request_id)

    def join(self, request_id: str) -> None:
        """It is to load, unless another of its family is."""
        family = _family_of(request_id)
        if family is not None and family not in self._first:
            keep_latest(self._first, family, request_id, MOST)


def _family_of(request_id: str) -> str | None:
    found = _CHILD.fullmatch(request_id)
    return None if found is None else found[1]
