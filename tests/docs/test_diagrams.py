"""The diagrams in docs/images are those of diagrams.py, and pages show each of them."""

import re
from xml.etree import ElementTree

import pytest

from tests.docs.diagrams import DIAGRAMS, IMAGES
from tests.docs.markdown import pages

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", DIAGRAMS)
def test_committed_diagram_is_up_to_date(name: str) -> None:
    committed = (IMAGES / f"{name}.svg").read_text(encoding="utf-8")
    assert committed == DIAGRAMS[name]().svg(), "run python -m tests.docs.diagrams"


@pytest.mark.parametrize("image", sorted(IMAGES.glob("*.svg")), ids=lambda image: image.name)
def test_images_are_valid_and_described(image: object) -> None:
    root = ElementTree.parse(str(image)).getroot()
    assert root.tag == f"{SVG}svg"
    for tag in ("title", "desc"):
        assert len(root.findtext(f"{SVG}{tag}") or "") > 10, tag


def test_pages_show_every_diagram_with_alternative_text() -> None:
    shown = {}
    for page in pages():
        for alternative, path in re.findall(
            r"!\[([^\]]*)\]\((\S+)\)", page.read_text(encoding="utf-8")
        ):
            assert alternative, f"{page.name}: {path} has no alternative text"
            shown[path.rpartition("/")[2]] = page.name
    assert {f"{name}.svg" for name in DIAGRAMS} - shown.keys() == set()
