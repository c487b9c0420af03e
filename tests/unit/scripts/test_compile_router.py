"""What a compiled module would lose without a word is found before it is compiled."""

from pathlib import Path

import pytest

from scripts.compile_router import HOT, LOST

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "source",
    [
        "class Kept(Struct, frozen=True):",
        "class Kept(msgspec.Struct, gc=False):",
        "class Kept(\n    Struct,\n    order=True,\n):",
        "class Kept(Value, frozen=True, order=True):",
        "class Kept(Thing, gc=False):",
        "Count = Annotated[int, Meta(ge=0)]",
    ],
)
def test_options_and_bounds_are_found(source: str) -> None:
    assert LOST.search(f"import msgspec\n\n\n{source}\n") is not None


@pytest.mark.parametrize(
    "source",
    ["class Kept(Value, frozen=True):", "class Kept(Thing):", "class Kept(msgspec.Struct):"],
)
def test_what_is_inherited_is_no_loss(source: str) -> None:
    assert LOST.search(f"import msgspec\n\n\n{source}\n    count: int = 3\n") is None


def test_nothing_that_is_compiled_would_lose_any() -> None:
    for name in HOT:
        assert LOST.search((ROOT / f"router/{name}.py").read_text(encoding="utf-8")) is None, name
