"""An exception in any hook costs one request at most: the engine lives, every block comes back, and
the next request is right."""

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.legs import decode, decode_body, prefill, prefill_body
from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import Server
from tests.vllm.inside.planted import IDLE, Fault, faults
from tests.vllm.measures import nothing_left
from tests.vllm.servers import ENVIRONMENT, INSIDE_SECONDS, OURS, SCHEDULER, Fleet, Kind

LEASE_SECONDS = 10
"""Short, as some leases run out here, and long enough for a slow machine to read the others."""
FAULTY = {
    **OURS,
    "kv_connector_module_path": "tests.vllm.faulty",
    "kv_connector_extra_config": {"kv_lease_duration": LEASE_SECONDS},
}
PAUSING = {"drain", "end_turns", "resume"}
"""Not called while an engine works."""


def test_no_fault_in_a_hook_ends_vllms_scheduler(fleet: Fleet, tmp_path: Path) -> None:
    """Hundreds of cases inside one process of vLLM's environment, see inside/cases.py."""
    results = tmp_path / "results.json"
    command = [str(fleet.python), "-m", "tests.vllm.inside.cases", str(fleet.model), str(results)]
    subprocess.run(command, check=True, env={**os.environ, **ENVIRONMENT}, timeout=INSIDE_SECONDS)
    cases = json.loads(results.read_text())
    assert len(cases) > 200
    assert {name: problem for name, problem in cases.items() if problem} == {}


@dataclass(frozen=True)
class Faulty:
    server: Server
    switch: Path

    def plant(self, fault: Fault) -> None:
        whole = self.switch.with_suffix(".new")
        whole.write_text(str(fault))
        whole.rename(self.switch)

    @property
    def has_fired(self) -> bool:
        return not self.switch.exists()


@pytest.fixture(scope="module")
def faulty(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Faulty]]:
    """P with vLLM's own scheduler class, D with ours."""
    folder = tmp_path_factory.mktemp("faults")
    options = {"prefill": (), "decode": SCHEDULER}
    kinds = [
        Kind(f"faulty-{side}", FAULTY, own, environment={"DISAGG_FAULT": str(folder / side)})
        for side, own in options.items()
    ]
    with fleet.servers(*kinds) as servers:
        yield {
            side: Faulty(server, folder / side)
            for side, server in zip(options, servers, strict=True)
        }


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_fault_in_a_hook_costs_one_request_at_most(
    faulty: dict[str, Faulty], alone: Server, side: str
) -> None:
    first, second = faulty["prefill"].server, faulty["decode"].server
    planted = [fault for fault in faults() if fault.hook not in IDLE | PAUSING]
    assert len(planted) > 10
    with nothing_left(first, second, seconds=10 * LEASE_SECONDS):
        for number, fault in enumerate(planted):
            prompt = tokens_of(100, 9000 + 100 * (side == "decode") + number)
            right = complete(alone, prompt)
            faulty[side].plant(fault)
            given = first.post("/v1/completions", prefill_body(prompt)).json()
            params = given["kv_transfer_params"] or {}
            answer = second.post("/v1/completions", decode_body(prompt, params))
            assert faulty[side].has_fired, fault
            if answer.status_code != 200:
                assert (side, fault.ends_load) == ("decode", True), f"{fault}: {answer.text}"
            else:
                tokens = answer.json()["choices"][0]["token_ids"]
                assert tuple(tokens) == right.tokens, fault
            again = tokens_of(100, 9500 + 100 * (side == "decode") + number)
            turn = decode(second, again, prefill(first, again))
            assert differences([complete(alone, again)], [turn.answer]) == [], fault
