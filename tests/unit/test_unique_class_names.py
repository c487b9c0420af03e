"""One name, one class: a reader who searches for a class of the product finds one."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_no_two_top_level_classes_of_the_product_share_a_name() -> None:
    places = defaultdict(list)
    for path in [*ROOT.glob("router/**/*.py"), *ROOT.glob("engine_ext/**/*.py")]:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert len(places) > 500, "the folders have moved"
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}
