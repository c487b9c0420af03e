"""Which model the demo serves: one that talks, a directory of the user's, or a random one."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from router.commands.demo.options import Options
from router.common.child_processes import Family

CHAT_MODEL = "SmolLM2-135M-Instruct"
TINY = "tiny"
# Another number where what is made of the same weights becomes another.
RECIPE = "chat-1"
POLL_SECONDS = 0.05


class Makers(Protocol):
    @property
    def tiny_model(self) -> Sequence[str]: ...
    @property
    def chat_model(self) -> Sequence[str]: ...


@dataclass(frozen=True, slots=True)
class Model:
    """`why_random`: set where it is random though nobody asked for that."""

    path: Path
    name: str
    talks: bool = False
    is_random: bool = False
    why_random: str = ""


def choose(family: Family, options: Options, makers: Makers) -> Model:
    """Makes it, if need be. Raises ChildEndedError when not even a random one can be made."""
    if isinstance(options.model, Path):
        return Model(options.model, options.model.resolve().name)
    if options.model == TINY:
        return _random(family, makers)
    path = cache_directory(os.environ) / RECIPE / CHAT_MODEL
    why = _make(family, "chat model", [*makers.chat_model, str(path)])
    return _random(family, makers, why) if why else Model(path, CHAT_MODEL, talks=True)


def cache_directory(environment: Mapping[str, str]) -> Path:
    """As the XDG rules have it: what is not absolute is not meant."""
    given = environment.get("XDG_CACHE_HOME", "")
    root = Path(given) if given.startswith("/") else Path.home() / ".cache"
    return root / "disagg-router"


def _random(family: Family, makers: Makers, why: str = "") -> Model:
    path = family.directory / "tiny-random"
    failure = _make(family, "random model", [*makers.tiny_model, str(path)], must=True)
    assert not failure
    return Model(path, path.name, is_random=True, why_random=why)


def _make(family: Family, name: str, command: list[str], must: bool = False) -> str:
    """Runs it to its end; returns why it failed. Raises ChildEndedError where it `must` not."""
    maker = family.start(name, command, "", shown=True)
    while maker.process.poll() is None:
        time.sleep(POLL_SECONDS)
    family.children.remove(maker)
    if maker.process.returncode == 0:
        return ""
    if must:
        maker.check()
    return maker.last_line() or f"status {maker.process.returncode}"
