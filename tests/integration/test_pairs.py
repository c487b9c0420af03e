"""Two prefill and two decode engines, of which one pair cannot reach each other: no request fails,
the router pairs both with others, and pairs them again when the way is open."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from router.commands.status import main as show_status
from tests.conftest import find_free_ports
from tests.integration.legs import coordinates_in, decode_body, prefill
from tests.integration.oracle import complete, differences, text_of
from tests.integration.processes import CONNECTORS, Launcher, Server, metric, wait_for

FAILED = {
    "pull": "disagg_engine_kv_pulls_failed_total",
    "push": "disagg_engine_kv_pushes_missed_total",
}
LOADED = {
    "pull": "disagg_engine_kv_pulls_ok_total",
    "push": "disagg_engine_kv_pushes_received_total",
}
AVOIDED = "disagg_router_pair_avoided{"


@dataclass
class Fleet:
    """The first prefiller and the second decoder do not reach each other."""

    mode: str
    ps: list[Server]
    ds: list[Server]
    router: Server
    cut_off: Path


@pytest.fixture(scope="module", params=["pull-fail", "pull-recompute", "push-fail"])
def fleet(
    request: pytest.FixtureRequest, launcher: Launcher, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    mode, policy = str(request.param).split("-")
    ports = find_free_ports(2)
    cut_off = tmp_path_factory.mktemp("cut-off") / "ports"
    cut_off.write_text(str(ports[1]))
    options: dict[str, Any] = {"connector": CONNECTORS[mode], "policy": policy}
    double: dict[str, Any] = {"module": "tests.integration.cut_off_engine"}
    with ExitStack() as stack:
        enter = stack.enter_context
        ps = [
            enter(launcher.engine("p-a", ports=(ports[0], ports[1]), **options)),
            enter(launcher.engine("p-b", **options)),
        ]
        ds = [
            enter(launcher.engine("d-a", **options)),
            enter(launcher.engine("d-b", "--cut-off", str(cut_off), **options, **double)),
        ]
        # In turn, so that the two meet at once.
        policies = ("--prefill-policy", "round_robin", "--decode-policy", "round_robin")
        yield Fleet(mode, ps, ds, enter(launcher.router(ps, ds[::-1], *policies)), cut_off)


def avoided(fleet: Fleet) -> bool:
    """Whether the router avoids that pair; it avoids no other."""
    found = [name for name in fleet.router.metrics() if name.startswith(AVOIDED)]
    prefiller, decoder = fleet.ps[0].port, fleet.ds[1].port
    labels = f'decoder="127.0.0.1:{decoder}",prefiller="127.0.0.1:{prefiller}"'
    assert found in ([], [AVOIDED + labels + "}"])
    return bool(found)


def test_an_answer_by_hand_names_the_prefill_engine_and_the_reason(fleet: Fleet) -> None:
    if fleet.mode == "push":
        pytest.skip("its legs go at once")
    prompt = text_of(90, 900)
    params = prefill(fleet.ps[0], prompt)
    answer = fleet.ds[1].post("/v1/completions", decode_body(prompt, params))
    content = answer.json()
    where = content["error"] if answer.status_code == 500 else content["kv_transfer_params"]
    failure = where["kv_load_failure"]
    assert failure["scope"] == "pair"
    assert failure["reason"]
    named = {name: failure[name] for name in ("remote_engine_id", "remote_host", "remote_port")}
    assert named.items() <= coordinates_in(params).items()


def test_a_pair_that_is_cut_off_is_not_paired_again_until_it_is_mended(
    fleet: Fleet, alone: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [text_of(90, 700 + number) for number in range(16)]
    right = [complete(alone, prompt) for prompt in prompts]
    before = [metric(d, FAILED[fleet.mode]) for d in fleet.ds]
    assert differences(right, [complete(fleet.router, prompt) for prompt in prompts]) == []

    def is_avoided() -> bool:
        """On a slow machine the pause is over by now, and another failure begins the next one."""
        return avoided(fleet) or (bool(complete(fleet.router, prompts[0])) and avoided(fleet))

    wait_for(is_avoided, "the pair is avoided")
    failed = [metric(d, FAILED[fleet.mode]) for d in fleet.ds]
    assert failed[0] == before[0]
    assert 1 <= failed[1] - before[1] <= 3
    assert all(metric(d, LOADED[fleet.mode]) > 0 for d in fleet.ds)
    granted = "disagg_engine_kv_leases_granted_total"
    assert all(metric(p, granted) > 1 for p in fleet.ps)
    assert show_status([f"http://127.0.0.1:{fleet.router.port}", "--json"]) == 0
    (pair,) = json.loads(capsys.readouterr().out)["avoided_pairs"]
    assert pair["prefiller"].endswith(str(fleet.ps[0].port))
    assert pair["decoder"].endswith(str(fleet.ds[1].port))
    fleet.cut_off.write_text("")
    loaded = metric(fleet.ds[1], LOADED[fleet.mode])
    wait_for(lambda: not avoided(fleet), "the pause is over", 40)
    again = [complete(fleet.router, text_of(90, 800 + number)) for number in range(8)]
    expected = [complete(alone, text_of(90, 800 + number)) for number in range(8)]
    assert differences(expected, again) == []
    assert not avoided(fleet)
    assert metric(fleet.ds[1], LOADED[fleet.mode]) > loaded
    assert [metric(d, FAILED[fleet.mode]) for d in fleet.ds] == failed
