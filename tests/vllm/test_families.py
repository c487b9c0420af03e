"""The models that people disaggregate, by name: docs/support.md says of each whether our connector
carries its caches, with the sizes that vLLM plans in each release."""

import json

import pytest

from tests.unit.test_support_document import FAMILIES
from tests.vllm.releases import BUILD, NEXT, python_of
from tests.vllm.servers import Fleet
from tests.vllm.test_releases import run_inside


@pytest.mark.parametrize("release", [BUILD, NEXT])
def test_families_are_carried_or_refused_as_the_page_says(
    fleet: Fleet, tmp_path_factory: pytest.TempPathFactory, release: str
) -> None:
    results = tmp_path_factory.mktemp("families") / "results.json"
    run_inside(python_of(fleet, release), "tests.vllm.inside.families", str(results))
    found: dict[str, str] = json.loads(results.read_text())
    assert list(found) == [family["models"] for family in FAMILIES]
    for family in FAMILIES:
        name, message = family["models"], family.get("message", "")
        assert message in found[name], name
        assert bool(message) == bool(found[name]), name
        if message:
            assert "or with NixlConnector" in found[name], "it says what to do"
