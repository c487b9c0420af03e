"""Text from engines and clients cannot forge a log line or send commands to a terminal."""

import logging
import sys

import pytest

from router.telemetry.logs import formatter_for

FORGED = (
    "no\n2026-01-01T00:00:00.000Z INFO request \x1b[2J\x1b]0;title\x07 \u202e\x9b31m\r\u2028end"
)


def record_of(message: str, *values: object, failed: bool = False) -> logging.LogRecord:
    error = sys.exc_info() if failed else None
    return logging.LogRecord("router", logging.WARNING, "x.py", 1, message, values, error)


@pytest.mark.parametrize("form", ["text", "short"])
def test_control_characters_in_a_message_are_escaped(form: str) -> None:
    line = formatter_for(form, False).format(record_of("an engine said %s", FORGED))  # type: ignore[arg-type]
    assert line.isprintable()
    assert r"no\n2026" in line
    assert r"\x1b[2J" in line


@pytest.mark.parametrize("form", ["text", "short"])
def test_control_characters_in_a_traceback_are_escaped_and_its_lines_indented(form: str) -> None:
    try:
        raise ValueError(FORGED)
    except ValueError:
        text = formatter_for(form, False).format(record_of("it failed", failed=True))  # type: ignore[arg-type]
    first, *others = text.split("\n")
    assert first.endswith("it failed")
    assert others
    assert all(one.startswith("    ") and one.isprintable() for one in others)


@pytest.mark.parametrize("form", ["text", "short"])
def test_other_languages_stay_as_they_are(form: str) -> None:
    assert formatter_for(form, False).format(record_of("é 漢字 🙂")).endswith("é 漢字 🙂")  # type: ignore[arg-type]
