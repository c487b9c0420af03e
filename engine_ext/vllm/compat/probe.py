"""Probes: is a name of vLLM's there, and is it what this package takes it for?

A probe looks at vLLM's live objects: parameters, fields, enum members, what `__init__` sets, what a
subclass must define. It cannot see a method that keeps its parameters and changes its meaning; the
tests inside each release are for that.
"""

import dis
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

ANY = "..."


@dataclass(frozen=True, slots=True)
class Symbol:
    """One object of vLLM's and all that is taken for granted of it. Lists of names are separated by
    white space."""

    at: str
    """`module:Class.attribute`, or a module alone."""
    has: str = ""
    """Members, fields and methods of a class, and what its `__init__` sets; what a function sets;
    names in a module."""
    takes: str | None = None
    """The first parameters, in their order. Whatever follows them has a default, unless ANY says
    that it is passed on as it comes."""
    uses: str = ""
    """All that the function's code names, in any order."""
    abstract: str = ""
    """What a subclass must define, at most: ours defines it."""
    values: tuple[object, ...] = ()
    """The object is one of these."""
    why: str = ""
    """The use of the name, and what breaks if the assumption fails."""


@dataclass(frozen=True, slots=True, eq=False)
class Feature:
    """What this extension does by way of one part of vLLM.

    A feature is on if each symbol is as expected, if all that it requires is on, if its modules can
    be imported (so an imported name needs no symbol), and if the operator has not turned it off.
    """

    name: str
    lost: str
    """What is missing without it, for the log."""
    symbols: tuple[Symbol, ...]
    requires: tuple["Feature", ...] = ()
    modules: tuple[str, ...] = ()
    """Modules below engine_ext.vllm that are used only if the feature is on."""
    patches: tuple[str, ...] = ()
    """Those of its modules, or of another feature's, that the plugin calls `install` of."""


def symbols(table: str) -> tuple[Symbol, ...]:
    """Read a table of symbols. A row is an object of vLLM's, which begins with `vllm.`, then
    perhaps the name of a field of Symbol (`is` for values) and what it lists. A row that begins
    with `-` says why, of the rows below it. A row may be wrapped anywhere."""
    rows: list[list[str]] = []
    for word in table.split():
        if word == "-" or word.startswith("vllm."):
            rows.append([])
        rows[-1].append(word)
    found, why = [], ""
    for first, *words in rows:
        if first == "-":
            why = " ".join(words)
        else:
            found.append(_symbol(why, first, *words))
    return tuple(found)


def _symbol(why: str, at: str, kind: str = "has", *names: str) -> Symbol:
    if kind == "is":
        return Symbol(at, values=tuple(map(int, names)), why=why)
    listed: dict[str, Any] = {kind: " ".join(names)}
    return Symbol(at, why=why, **listed)


def problem(symbol: Symbol) -> str | None:
    """Return one line that says how the symbol differs; None if it is as expected."""
    try:
        found = _found(symbol.at)
    except Exception as error:
        return f"{symbol.at}: {error}"
    if symbol.values and found not in symbol.values:
        return f"{symbol.at} is {found}, not {' or '.join(map(str, symbol.values))}"
    missing = sorted(set(symbol.has.split()) - set(_attributes(found))) if symbol.has else []
    if missing:
        return f"{symbol.at} has no {', '.join(missing)}"
    if symbol.takes is not None and not _takes(found, symbol.takes.split()):
        takes = ", ".join(inspect.signature(found).parameters)
        return f"{symbol.at} takes ({takes}), not ({', '.join(symbol.takes.split())})"
    uses = symbol.uses.split()
    if uses and set(uses) != set(found.__code__.co_names):
        return f"{symbol.at} uses {', '.join(found.__code__.co_names)}, not {', '.join(uses)}"
    asked = {*getattr(found, "__abstractmethods__", ())} - {*symbol.abstract.split()}
    if symbol.abstract and asked:
        return f"{symbol.at} also requires {', '.join(sorted(asked))}"
    return None


def _found(at: str) -> Any:
    module, _, path = at.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split(".") if path else ():
        found = getattr(found, part)
    return found


def _takes(function: Any, names: list[str]) -> bool:
    """Of what this package has wrapped itself, the original is asked."""
    parameters = list(inspect.signature(function).parameters.values())
    wanted = [name for name in names if name != ANY]
    is_optional = ANY in names or all(
        each.default is not each.empty or each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        for each in parameters[len(wanted) :]
    )
    return [each.name for each in parameters[: len(wanted)]] == wanted and is_optional


def _attributes(found: Any) -> Iterator[str]:
    yield from dir(found)
    for fields in ("__dataclass_fields__", "model_fields"):
        yield from getattr(found, fields, ())
    for function in (found, *(cls.__init__ for cls in getattr(found, "__mro__", ()))):
        code = getattr(inspect.unwrap(function), "__code__", None)
        steps = () if code is None else dis.get_instructions(code)
        yield from (each.argval for each in steps if each.opname == "STORE_ATTR")
