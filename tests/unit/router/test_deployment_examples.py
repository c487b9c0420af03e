"""The files of examples/deploy are valid for the commands that read them."""

import configparser
import re
import shlex
from pathlib import Path

import pytest

from router.commands.cli import main, parser
from router.settings import Address, load

FOLDER = Path(__file__).parents[3] / "examples" / "deploy"


def test_the_configuration_file_passes_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    file = FOLDER / "config.yaml"
    assert main(["--config", str(file), "--check"]) == 0
    settings = load({"config": str(file)})
    assert settings.decoders == (Address("10.0.1.1", 8200),)
    in_comments = re.findall(r"^# ([a-z-]+): ", file.read_text(), re.MULTILINE)
    assert in_comments
    assert {f"--{name}" for name in in_comments} <= set(parser().option_strings())


def test_the_systemd_unit_runs_options_that_exist() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(FOLDER / "disagg-router.service")
    for name in ("ExecStart", "ExecStartPre"):
        program, *options = shlex.split(unit["Service"][name])
        assert program.endswith("/bin/disagg-router")
        assert parser().parse_args(options).config == "/etc/disagg-router/config.yaml"
    config = load({"config": str(FOLDER / "config.yaml")})
    assert float(unit["Service"]["TimeoutStopSec"]) > config.shutdown_timeout
