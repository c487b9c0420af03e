"""What every source of engines is."""

from __future__ import annotations

import textwrap
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from router.fleet.engine_spec import ListedEngine


class SourceError(Exception):
    """The world's fault, in one line: a source cannot tell which engines there are."""


def line_of(error: BaseException) -> str:
    """Whatever it says, in one line that is not long."""
    return textwrap.shorten(" ".join(f"{type(error).__name__}: {error}".split()), 300)


@dataclass(frozen=True, slots=True)
class SourceReport:
    """All that a source lists, no address twice, in an order that means nothing; None where it
    cannot tell, and what it listed last stands.
    `trouble` says what is wrong, in one line; empty if nothing is."""

    listed: tuple[ListedEngine, ...] | None = None
    problem: str = ""


class EngineSource(Protocol):
    """`first` is what it knows before it is watched."""

    @property
    def name(self) -> str:
        """Its own among all sources; a label of metrics."""

    @property
    def first(self) -> SourceReport: ...

    def watch(self) -> AsyncGenerator[SourceReport, None]:
        """A report whenever it has looked, changed or not; ends when there is nothing more to come.
        The world's faults are reports, not exceptions. What it waits for has a deadline."""
