"""Two reference engines with one engine_id, real NIXL: noticed at the engine and at the router."""

import re
import subprocess
import sys
from typing import Any

import pytest

from tests.integration.legs import decode, prefill
from tests.integration.oracle import complete, differences, text_of
from tests.integration.processes import CONNECTORS, Launcher, Server, metric, wait_for

LEASES = "disagg_engine_kv_leases_active"
CLASHES = "disagg_engine_kv_engine_id_clashes_total"


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_two_engines_with_one_engine_id_answer_right_and_it_is_told(
    launcher: Launcher, alone: Server, mode: str
) -> None:
    """A lease of a quarter of an hour ends at once: the prefill engine is told of it."""
    settings: dict[str, Any] = {
        "extra": {"kv_lease_duration": 900},
        "connector": CONNECTORS[mode],
        "engine_id": "copied",
    }
    with (
        launcher.engine("same-p", **settings) as prefiller,
        launcher.engine("same-d", **settings) as decoder,
        launcher.router([prefiller], [decoder]) as router,
    ):
        prompts = [text_of(200, 60 + number) for number in range(3)]
        for prompt in prompts[:2]:
            turn = decode(decoder, prompt, prefill(prefiller, prompt))
            assert differences([complete(alone, prompt)], [turn.answer]) == []
        assert differences([complete(alone, prompts[2])], [complete(router, prompts[2])]) == []
        assert metric(decoder, CLASHES) == 3
        wait_for(lambda: metric(prefiller, LEASES) == 0, "the prefill engine has its blocks back")
        lines = re.findall(r".*two engines have the engine_id copied.*", decoder.log.read_text())
        assert len(lines) == 1
        params = prefill(prefiller, prompts[0])
        assert f"127.0.0.1:{params['remote_port']}" in lines[0]

        def status() -> str:
            command = [
                sys.executable,
                "-m",
                "router.commands.cli",
                "status",
                f"127.0.0.1:{router.port}",
            ]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        wait_for(lambda: "one engine_id at several engines" in status(), status)
        assert "have the same engine_id, copied" in router.log.read_text()
        decode(decoder, prompts[0], params)
