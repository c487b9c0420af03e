"""The images' recipe. No Docker is needed, so bases and Docker's own syntax are not tried here."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.k8s.chart import CHART, ROOT
from tests.k8s.dockerfile import Stage, stages

STAGES = stages(ROOT / "Dockerfile")
FINAL = ("router", "engine", "reference")
PINNED = re.compile(r"\S+:\d[\w.]*\.\d[\w.-]*|\S+:v\d+\.\d+\.\d+|\S+@sha256:[0-9a-f]{64}")
PORTS = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))


def test_the_images_are_those_that_are_documented() -> None:
    assert {*FINAL} <= STAGES.keys()
    assert list(STAGES)[-1] == "router"  # what a plain build makes


@pytest.mark.parametrize("stage", STAGES.values(), ids=list(STAGES))
def test_bases_are_pinned_and_nothing_is_downloaded_past_the_package_managers(
    stage: Stage,
) -> None:
    assert stage.base in STAGES or PINNED.fullmatch(stage.base), stage.base
    assert not stage.all("ADD")
    for command in stage.all("RUN"):
        assert not re.search(r"\b(curl|wget|sudo|apt-get upgrade|git clone)\b", command)


@pytest.mark.parametrize("stage", STAGES.values(), ids=list(STAGES))
def test_what_pip_installs_is_pinned_and_not_kept_twice(stage: Stage) -> None:
    for command in stage.all("RUN"):
        for install in re.findall(r"pip (?:install|wheel) [^&]*", command):
            assert re.search(r"--no-cache(-dir)?\b", install), install
            assert "--constraint" in install or "--no-deps" in install, install
            for word in install.split():
                if re.fullmatch(r"[a-z][a-z0-9-]+(\[.*\])?", word) and word not in WORDS:
                    pytest.fail(f"{word} has no version in: {install}")


WORDS = {"pip", "install", "wheel"}


@pytest.mark.parametrize("name", FINAL)
def test_images_run_as_a_number_and_not_as_root(name: str) -> None:
    """A number, because Kubernetes cannot know that a name is not root's."""
    [user] = STAGES[name].all("USER")
    assert user == "10001:10001"
    assert STAGES[name].instructions[-1].word in ("ENTRYPOINT", "CMD")
    assert not [one for one in STAGES[name].all("RUN") if "pip" in one] or name == "engine"


@pytest.mark.parametrize("name", FINAL)
def test_a_process_is_started_and_not_a_shell_that_keeps_its_signals(name: str) -> None:
    [entry] = STAGES[name].all("ENTRYPOINT")
    assert entry.startswith('["')


def test_the_ports_and_the_user_are_the_charts() -> None:
    router, engines = PORTS["router"], PORTS["engines"]
    assert STAGES["router"].all("EXPOSE") == [f"{router['port']} {router['livenessPort']}"]
    assert STAGES["engine"].all("EXPOSE") == [f"{engines['port']} {engines['sideChannelPort']}"]
    assert PORTS["podSecurityContext"]["runAsUser"] == 10001


def test_vllm_is_of_a_version_that_the_connector_was_tested_with() -> None:
    release = STAGES["engine"].base.rpartition(":v")[2].rpartition(".")[0]
    source = (ROOT / "engine_ext/vllm/compat/support.py").read_text(encoding="utf-8")
    (known,) = re.findall(r"^KNOWN = (.*)$", source, re.MULTILINE)
    assert f'"{release}"' in known


def test_the_extras_that_images_have_are_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    commands = " ".join(one for stage in STAGES.values() for one in stage.all("RUN"))
    asked = {name for each in re.findall(r"\[([\w,]+)\]", commands) for name in each.split(",")}
    assert {"kubernetes", "engine"} <= asked <= project["optional-dependencies"].keys()


def test_the_routers_image_can_be_installed_as_the_recipe_says(tmp_path: Path) -> None:
    """The steps of its first stages, in a directory instead of an image's root."""
    sent_to_docker(tmp_path / "context")
    for name in ("wheel", "router-install"):
        carry_out(STAGES[name], tmp_path)
    program = tmp_path / "opt/disagg/bin/disagg-router"
    done = subprocess.run([program, "--help-all"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "--liveness-port" in done.stdout
    packages = {path.name for path in (tmp_path / "opt/disagg/lib").glob("*/site-packages/*")}
    assert not packages & {"torch", "nixl", "pytest"}
    assert "lightkube" in packages  # what discovery needs


def sent_to_docker(context: Path) -> None:
    """What .dockerignore leaves of the checkout."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for line in lines:
        if line.startswith("!"):
            source, target = ROOT / line[1:], context / line[1:]
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)


def carry_out(stage: Stage, root: Path) -> None:
    directory = root
    for one in stage.instructions:
        if one.word == "WORKDIR":
            directory = root / one.rest.lstrip("/")
            directory.mkdir(parents=True, exist_ok=True)
        elif one.word == "COPY" and not one.rest.startswith("--from"):
            *sources, target = one.rest.split()
            into = root / target.lstrip("/") if target.startswith("/") else directory / target
            for source in sources:
                copy(root / "context" / source, into)
        elif one.word == "RUN":
            command = re.sub(r"(?<![\w.])/(?=(build|wheels|opt|constraints))", f"{root}/", one.rest)
            run(command, directory)


def copy(source: Path, into: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, into)
    else:
        into.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, into)


def run(command: str, directory: Path) -> None:
    done = subprocess.run(
        ["sh", "-ec", command.replace("python -m", f"{sys.executable} -m")],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
