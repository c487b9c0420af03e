"""Writes the source of every function of vLLM's that a probe names: `python -m
tests.vllm.inside.touched FOLDER`, once in each of two releases, then `diff -ru`.

A function that kept its name and parameters may have changed its meaning, which no probe sees.
"""

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine_ext.vllm.compat.probe import Symbol
from engine_ext.vllm.compat.support import OPTIONAL
from engine_ext.vllm.compat.vllm_symbols import REQUIRED


def functions(symbol: Symbol) -> Iterator[tuple[str, Any]]:
    module, _, path = symbol.at.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split(".") if path else ():
        found = getattr(found, part)
    yield symbol.at, found
    for name in symbol.has.split():
        yield f"{symbol.at}.{name}", getattr(found, name, None)


def main(folder: Path) -> None:
    folder.mkdir(parents=True)
    for feature in REQUIRED + OPTIONAL:
        for symbol in feature.symbols:
            for at, found in functions(symbol):
                if inspect.isfunction(inspect.unwrap(found)) or inspect.ismethod(found):
                    source = inspect.getsource(inspect.unwrap(found))
                    (folder / at.replace(":", ".")).write_text(source, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
