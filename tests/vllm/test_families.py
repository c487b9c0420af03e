"""The models that people disaggregate, by name: docs/support.md says of each whether our connector
carries its caches, with the sizes that vLLM plans in each release."""

from pathlib import Path

import pytest

from tests.unit.test_support_document import FAMILIES
from tests.vllm.releases import BUILD, NEXT, python_of
from tests.vllm.servers import Fleet
from tests.vllm.test_releases import results_inside


@pytest.mark.parametrize("release", [BUILD, NEXT])
def test_families_are_carried_or_refused_as_the_page_says(
    fleet: Fleet, tmp_path: Path, release: str
) -> None:
    found = results_inside(python_of(fleet, release), tmp_path, "tests.vllm.inside.families")
    assert list(found) == [family["models"] for family in FAMILIES]
    for family in FAMILIES:
        name, message = family["models"], family.get("message", "")
        assert message in found[name], name
        assert bool(message) == bool(found[name]), name
        if message:
            assert "or with NixlConnector" in found[name], "it says what to do"
