"""Whether a name of vLLM's is there and is what we take it for."""

import dis
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

ANY = "..."


@dataclass(frozen=True, slots=True)
class Name:
    at: str
    """`module:Class.attribute`, or a module alone."""
    takes: tuple[str, ...] | None = None
    """The first parameters, in their order. Whatever follows them has a default, unless ANY says
    that it is passed on as it comes."""
    has: tuple[str, ...] = ()
    """Members, fields and methods of a class, and what its `__init__` sets; what a function sets;
    names in a module."""
    uses: tuple[str, ...] = ()
    """All that the function's code names, in any order."""
    asks: tuple[str, ...] = ()
    """What a subclass must define, at most: ours defines it."""
    values: tuple[object, ...] = ()
    """One of which it is."""


def problem(name: Name) -> str | None:
    """One line; None where all is as we know it."""
    try:
        found = _found(name.at)
    except Exception as error:
        return f"{name.at}: {error}"
    if name.values and found not in name.values:
        return f"{name.at} is {found}, not {' or '.join(map(str, name.values))}"
    missing = sorted(set(name.has) - set(_attributes(found))) if name.has else []
    if missing:
        return f"{name.at} has no {', '.join(missing)}"
    if name.takes is not None and not _takes(found, name.takes):
        takes = ", ".join(inspect.signature(found).parameters)
        return f"{name.at} takes ({takes}), not ({', '.join(name.takes)})"
    if name.uses and set(name.uses) != set(found.__code__.co_names):
        return f"{name.at} uses {', '.join(found.__code__.co_names)}, not {', '.join(name.uses)}"
    more = sorted({*getattr(found, "__abstractmethods__", ())} - {*name.asks}) if name.asks else []
    if more:
        return f"{name.at} asks for {', '.join(more)}, too"
    return None


def _found(at: str) -> Any:
    module, _, path = at.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split(".") if path else ():
        found = getattr(found, part)
    return found


def _takes(function: Any, names: tuple[str, ...]) -> bool:
    """Of what we have wrapped ourselves, the original is asked."""
    given = list(inspect.signature(function).parameters.values())
    wanted = [name for name in names if name != ANY]
    is_optional = ANY in names or all(
        each.default is not each.empty or each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        for each in given[len(wanted) :]
    )
    return [each.name for each in given[: len(wanted)]] == wanted and is_optional


def _attributes(found: Any) -> Iterator[str]:
    yield from dir(found)
    for fields in ("__dataclass_fields__", "model_fields"):
        yield from getattr(found, fields, ())
    for function in (found, *(cls.__init__ for cls in getattr(found, "__mro__", ()))):
        code = getattr(inspect.unwrap(function), "__code__", None)
        steps = () if code is None else dis.get_instructions(code)
        yield from (each.argval for each in steps if each.opname == "STORE_ATTR")
