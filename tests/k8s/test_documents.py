"""The commands of the pages on Kubernetes work as they are printed."""

import re
import shlex

import pytest
import yaml

from tests.k8s.chart import CHART, EXAMPLES, ROOT, helm
from tests.k8s.dockerfile import stages

TEXT = "".join(
    (ROOT / "docs" / page).read_text(encoding="utf-8")
    for page in ("kubernetes-start.md", "kubernetes.md", "upgrades.md")
)
COMMANDS = [
    " ".join(line.split())
    for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
]
INSTALLS = [line for line in COMMANDS if line.startswith("helm install ")]


@pytest.mark.parametrize("command", INSTALLS)
@pytest.mark.parametrize("which", ["helm3", "helm4"])
def test_every_install_renders(which: str, command: str) -> None:
    _, _, release, _, *arguments = shlex.split(command.replace("$REGISTRY", "registry.test:5000"))
    known = {
        "fleet.yaml": str(EXAMPLES / "engines.yaml"),
        **{f"{CHART.relative_to(ROOT)}/examples/{p.name}": str(p) for p in EXAMPLES.iterdir()},
    }
    done = helm(which, "template", release, CHART, *(known.get(one, one) for one in arguments))
    assert done.returncode == 0, done.stderr
    assert "kind: Deployment" in done.stdout


def test_a_new_group_starts_with_the_weight_that_it_is_given() -> None:
    [command] = [one for one in INSTALLS if "green" in one]
    _, _, release, _, *arguments = shlex.split(command)
    arguments[arguments.index("fleet.yaml")] = str(EXAMPLES / "engines.yaml")
    done = helm("helm4", "template", release, CHART, *arguments)
    for manifest in yaml.safe_load_all(done.stdout):
        if manifest["kind"] == "Deployment":
            metadata = manifest["spec"]["template"]["metadata"]
            assert metadata["annotations"] == {"disagg-router.io/weight": "0"}
            assert metadata["labels"]["disagg-router.io/group"] == "green"


def test_the_images_that_are_built_are_stages() -> None:
    targets = re.findall(r"--target (\w+)", TEXT)
    assert set(targets) == {"router", "engine", "reference"}
    assert set(targets) <= stages(ROOT / "Dockerfile").keys()


def test_examples_name_the_file_that_they_are() -> None:
    for path in EXAMPLES.iterdir():
        assert f"examples/{path.name}" in path.read_text(encoding="utf-8")
