"""Tests of the line that the router logs when it starts."""

from typing import Any

import pytest

from router.server.serve import Listeners, announce, bind_at
from router.settings import load

A, B, C = (f"http://10.0.0.{n}:8000" for n in (1, 2, 3))


@pytest.mark.parametrize(
    ("engines", "counted"),
    [
        ({"prefill": [A], "decode": [B, C]}, "1 prefill and 2 decode engines"),
        ({"prefill": [A, B], "decode": [A, B]}, "2 engines of both roles"),
        (
            {"prefill": [A, B], "decode": [B, C]},
            "1 engines of both roles, 1 prefill and 1 decode engines",
        ),
    ],
)
def test_the_start_line_counts_an_engine_of_both_roles_once(
    engines: dict[str, Any], counted: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "disagg_router")
    with bind_at("127.0.0.1", 0) as listener:
        announce(load(engines), Listeners(listener, None))
    assert caplog.messages[0].endswith(f" with {counted}")


@pytest.mark.parametrize(("value", "warns"), [("tokens", False), ("whole", True), ("prompt", True)])
def test_reuse_by_messages_is_warned_of_at_start(
    value: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with bind_at("127.0.0.1", 0) as listener:
        settings = load({"prefill": [A], "decode": [B], "conversation_unproven": value})
        announce(settings, Listeners(listener, None))
    assert any("--conversation-unproven" in line for line in caplog.messages) is warns
