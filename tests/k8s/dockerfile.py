"""Dockerfiles, as far as can be checked without Docker: their instructions, stage by stage."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

VARIABLE = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True)
class Instruction:
    word: str
    rest: str


@dataclass
class Stage:
    name: str
    base: str
    """With arguments' defaults filled in."""
    instructions: list[Instruction] = field(default_factory=list)

    def all(self, word: str) -> list[str]:
        return [one.rest for one in self.instructions if one.word == word]


def instructions(text: str) -> Iterator[Instruction]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n", "", "\n".join(lines)).splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            yield Instruction(word, " ".join(rest.split()))


def stages(path: Path) -> dict[str, Stage]:
    arguments: dict[str, str] = {}
    found: dict[str, Stage] = {}
    stage: Stage | None = None
    for one in instructions(path.read_text(encoding="utf-8")):
        if one.word == "FROM":
            base, _, name = one.rest.partition(" AS ")
            filled = VARIABLE.sub(lambda match: arguments[match[1]], base)
            stage = found.setdefault(name, Stage(name, filled))
        elif stage is not None:
            stage.instructions.append(one)
        elif one.word == "ARG":
            name, _, default = one.rest.partition("=")
            arguments[name] = default
    return found
