"""What the reference engine tells routers and people, and what it may be told, besides requests."""

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.integration.legs import coordinates_in, decode, prefill
from tests.integration.oracle import complete, text_of
from tests.integration.processes import CONNECTORS, Launcher, metric, wait_for

LEASES = "disagg_engine_kv_leases_active"


def test_an_engine_says_who_it_is_and_gives_up_kv_by_name(launcher: Launcher) -> None:
    with launcher.engine("pages") as engine:
        said = engine.get("/disagg/identity").json()
        assert (said["engine"], said["transfer_modes"]) == ("disagg-engine", ["pull"])
        assert {"prefix_proof", "release", "streamed_kv_transfer_params"} <= {*said["capabilities"]}
        params = prefill(engine, text_of(100, 1))
        (rank,) = said["ranks"]
        assert coordinates_in(rank) == coordinates_in(params)
        assert (rank["max_step_tokens"], rank["max_num_seqs"]) == (256, 64)
        assert "target_itl_ms" not in rank
        assert metric(engine, LEASES) == 1
        answers = []
        for _ in range(2):
            answer = engine.post("/disagg/release", {"kv_transfer_params": params})
            answers.append(answer.json())
            wait_for(lambda: metric(engine, LEASES) == 0, "the blocks are given up")
        assert answers == [{"released": True}, {"released": False}]


def test_an_engine_reports_how_long_its_steps_take_once_it_has_seen_enough(
    launcher: Launcher,
) -> None:
    with launcher.engine("steps") as engine:

        def model() -> dict[str, float] | None:
            (rank,) = engine.get("/disagg/identity").json()["ranks"]
            found: dict[str, float] | None = rank.get("step_model")
            return found

        assert model() is None
        for number in range(12):  # each a step or more with 256 prompt tokens, and 20 that decode
            complete(engine, text_of(330 + 100 * number, 100 + number), max_tokens=20)
        found = model()
        assert found is not None
        assert min(found.values()) >= 0
        assert min(found["base_ms"], found["token_us"]) > 0
        assert found["steps"] >= 12 * 21


LINE = re.compile(
    r"request \S+: (READ|WRITE) peer=(\S+) blocks=4 bytes=(\d+) ms=\d+\.\d proven_tokens=100\n"
)


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_transfer_is_seen_on_the_leases_page_in_the_metrics_and_as_one_line_in_the_log(
    launcher: Launcher, mode: str
) -> None:
    connector = CONNECTORS[mode]
    with (
        launcher.engine("prefill", connector=connector) as prefiller,
        launcher.engine("decode", connector=connector) as decoder,
    ):
        prompt = text_of(100, 2)
        params = prefill(prefiller, prompt)
        said = prefiller.get("/disagg/leases")
        (rank,) = said.json()["ranks"]
        (lease,) = rank["leases"]
        assert (lease["state"], rank["num_leases"]) == ("granted", 1)
        assert 0 < lease["seconds_left"] <= 30
        assert params["remote_request_id"] not in said.text
        path = f"/disagg/leases?request_id={params['remote_request_id']}"
        assert prefiller.get(path).json()["ranks"][0]["leases"][0]["request"] == lease["request"]
        assert prefiller.get(f"{path}x").json()["ranks"][0]["leases"] == []
        decode(decoder, prompt, params)
        wait_for(lambda: metric(prefiller, LEASES) == 0, "the lease has ended")
        assert prefiller.get("/disagg/leases").json()["ranks"][0]["leases"] == []
        mover, other = (decoder, prefiller) if mode == "pull" else (prefiller, decoder)
        (peer,) = mover.get("/disagg/leases").json()["ranks"][0]["peers"]
        ((what, engine_id, num_bytes),) = LINE.findall(mover.log.read_text())
        assert engine_id == peer["engine_id"]
        assert what == ("READ" if mode == "pull" else "WRITE")
        assert metric(mover, r"vllm:nixl_bytes_transferred_sum\{.*") == int(num_bytes)
        (rank,) = mover.get("/disagg/leases").json()["ranks"]
        (moved,), (transfer,) = rank["moved"], rank["transfers"]
        assert 0 < moved.pop("busy_seconds") <= moved.pop("seconds") < 10
        assert moved == {
            "what": what,
            "engine_id": engine_id,
            "transfers": 1,
            "bytes": int(num_bytes),
        }
        assert (transfer["blocks"], transfer["bytes"]) == (4, int(num_bytes))
        assert 0 < transfer["seconds"] < 10
        (rank,) = other.get("/disagg/leases").json()["ranks"]
        assert (rank["moved"], rank["transfers"], rank["engine_id"]) == ([], [], engine_id)
        assert metric(mover, r"vllm:nixl_xfer_time_seconds_count\{.*") == 1
        assert metric(mover, "disagg_engine_kv_handshake_seconds_count") == 1
        assert not LINE.search(other.log.read_text())


def told(answer: httpx.Response, seconds: float) -> Iterator[tuple[str, Any]]:
    """Events of a router's page as they come, for so long; it says something at least as often."""
    name, latest = "", time.monotonic() + seconds
    for line in answer.iter_lines():
        assert time.monotonic() < latest
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            yield name, json.loads(line[6:])


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_routers_page_is_told_what_moved_for_whom_and_how_fast(
    launcher: Launcher, mode: str
) -> None:
    connector = CONNECTORS[mode]
    with (
        launcher.engine("prefill", connector=connector) as prefiller,
        launcher.engine("decode", connector=connector) as decoder,
        launcher.router([prefiller], [decoder], "--ui") as router,
        httpx.stream("GET", f"{router.url}/ui/events", timeout=15) as page,
    ):
        events = told(page, 30)
        assert next(name for name, _ in events) == "snapshot"
        body = {"model": "tiny", "prompt": text_of(100, 3), "max_tokens": 4, "ignore_eos": True}
        answer = router.post("/v1/completions", body, request_id="mine:a/b")
        assert answer.status_code == 200, answer.text
        key = ""
        moves: dict[str, Any] = {}
        speeds: list[dict[str, Any]] = []
        while not (key and key in moves and speeds):
            name, content = next(events)
            if name == "ended":
                ((key, asked),) = [(one["key"], one["id"]) for one in content["requests"]]
                assert asked == "mine:a/b"
            elif name == "moved":
                moves |= content
            elif name == "change":
                ways = content.get("ways", {}).values()
                speeds += [way for way in ways if way and way["bytes_per_second"]]
        move = moves[key]["prompt"]
        assert (move["blocks"], moves[key]["turn"]) == (4, None)
        mover = decoder if mode == "pull" else prefiller
        assert metric(mover, r"vllm:nixl_bytes_transferred_sum\{.*") == move["bytes"]
        assert (speeds[0]["from"], speeds[0]["kind"]) == (f"127.0.0.1:{prefiller.port}", "prompt")
