"""The models that people disaggregate, by name, as docs/support.md lists them: our connector
carries their caches, with the sizes that vLLM plans in each release."""

from pathlib import Path

import pytest

from tests.unit.test_support_document import FAMILIES
from tests.vllm.releases import BUILD, NEXT, python_of
from tests.vllm.servers import Fleet
from tests.vllm.test_releases import results_inside


@pytest.mark.parametrize("release", [BUILD, NEXT])
def test_families_are_carried(fleet: Fleet, tmp_path: Path, release: str) -> None:
    found = results_inside(python_of(fleet, release), tmp_path, "tests.vllm.inside.families")
    assert found == dict.fromkeys((family["models"] for family in FAMILIES), "")
    assert list(found) == [family["models"] for family in FAMILIES]
