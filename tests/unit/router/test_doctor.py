"""disagg-router doctor: a line for each check, the cure, and the exit status."""

import asyncio
import email.utils
import json
import re
import socket
import time
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from time import monotonic as now
from typing import Any

import pytest

from router.commands.console import paint
from router.commands.doctor import checks as checks_module
from router.commands.doctor.checks import MAX_TRIES, Check, Findings, State, check_clock, retried
from router.commands.doctor.command import check_files, check_redis, lines, main
from router.commands.doctor.fleet_checks import TEST_PROMPT_TOKENS, check_fleet, open_fleet
from router.coordination.role_balance import RoleKeeper
from router.settings import UNSAFE_REUSE, Settings
from router.ui.engine_reports import hash_request_id
from scripts.mock_engine import MockEngine, Peer, Received
from tests.conftest import find_free_ports
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import answering, fails, usual_decode, usual_prefill
from tests.unit.router.fleet.test_partners import NO_CONNECTOR_PAGE, page
from tests.unit.router.mock_engine import LendingEngines
from tests.unit.router.sglang_engine import DECODE, NULL, PREFILL, Rooms, SGLangEngine
from tests.unit.router.test_target_itl import RANK, STEP_MODEL

OWN_ID = re.compile(r"(warm-up|doctor)-[0-9a-f]{16}")


@pytest.fixture(autouse=True)
def no_pause_before_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_module, "RETRY_PAUSE_S", 0.0)
    monkeypatch.setattr("router.commands.doctor.transfer_check.TRANSFER_REPORT_TIMEOUT_S", 0.3)


def moves_kv(engine: MockEngine) -> None:
    """The engine plays both roles, and reports a READ of four blocks for each request that it
    decodes."""
    transfers: list[dict[str, Any]] = []

    async def decode(request: Received, peer: Peer) -> None:
        if request.json["kv_transfer_params"].get("do_remote_decode"):
            return await usual_prefill(request, peer)
        found = OWN_ID.search(request.header("x-request-id") or "")
        moved = {"what": "READ", "engine_id": "p", "blocks": 4, "bytes": 9, "seconds": 0.0031}
        moved |= {"found_by": hash_request_id(found[0] if found else ""), "age_seconds": 0}
        transfers.append(moved)
        engine.pages["/disagg/leases"] = json.dumps({"ranks": [{"transfers": transfers}]}).encode()
        await usual_decode(request, peer)

    engine.usual = decode


def at(port: int, **changes: Any) -> dict[str, Any]:
    """An identity page whose side channel is at a port of this machine."""
    made = page(**changes)
    where = {"remote_engine_id": f"e-{port}", "remote_host": "127.0.0.1", "remote_port": port}
    made["ranks"][0] |= where
    return made


def settings_of(ps: Sequence[MockEngine], ds: Sequence[MockEngine], **changes: Any) -> Settings:
    named = {
        role: tuple(f"127.0.0.1:{one.port}" for one in engines)
        for role, engines in (("prefill", ps), ("decode", ds))
    }
    return Settings(**(named | changes))


async def examine(settings: Settings) -> list[Check]:
    async with open_fleet(settings) as state:
        return await check_fleet(state, 5.0, lambda text: None)


def failed(checks: Sequence[Check]) -> dict[str, str]:
    return {one.name: one.text for one in checks if one.state is State.FAIL}


def found(checks: Sequence[Check], name: str) -> Check:
    (one,) = (check for check in checks if check.name == name)
    return one


async def test_why_an_engine_lends_no_prefixes_is_shown(p: MockEngine, d: MockEngine) -> None:
    p.identity, d.identity = at(p.port), at(d.port)
    p.identity["ranks"][0]["loan_problem"] = "several\nranks"
    checks = await examine(settings_of([p], [d]))
    texts = [check.text for check in checks if check.name == "identity"]
    assert [text.partition("; ")[2] for text in texts] == ["lends no prefixes: several ranks", ""]


async def test_fleet_that_is_well_moves_kv(p: MockEngine, d: MockEngine) -> None:
    p.identity, d.identity = at(p.port), at(d.port)
    moves_kv(p)
    moves_kv(d)
    checks = await examine(settings_of([p], [d]))
    assert not failed(checks)
    assert found(checks, "KV moved").text == "yes, 4 blocks in 3.1 ms"
    assert found(checks, "KV moved back").text == "yes, 4 blocks in 3.1 ms"
    assert found(checks, "engines agree").text == "3 facts are equal"
    assert found(checks, "transfer mode").text == "pull"
    assert found(checks, "leases").text == "all last 30 s"
    assert found(checks, "secret").state is State.SKIPPED
    assert len(p.requests[0].json["prompt"]) == TEST_PROMPT_TOKENS == 64


async def test_a_check_that_fails_once_is_repeated(p: MockEngine, d: MockEngine) -> None:
    """As a test request in a busy fleet."""
    p.identity = d.identity = page()
    moves_kv(p)
    moves_kv(d)
    d.scripts = [fails]
    checks = await examine(settings_of([p], [d]))
    assert failed(checks) == {}
    assert found(checks, "KV moved").state is State.OK


async def test_a_check_that_always_fails_is_reported_once() -> None:
    tries: list[int] = []

    async def check() -> list[Check]:
        tries.append(len(tries))
        return [Check("fleet", "models", State.FAIL, f"try {len(tries)}")]

    assert [one.text for one in await retried(check)] == [f"try {MAX_TRIES}"]
    assert len(tries) == MAX_TRIES


async def test_prefill_engine_that_cannot_read_from_the_decode_engine_is_named(
    p: MockEngine, d: MockEngine
) -> None:
    p.identity, d.identity = at(p.port), at(d.port)
    moves_kv(p)
    moves_kv(d)
    p.pages["/disagg/leases"] = b'{"ranks": []}'
    prefill = p.usual

    async def computes(request: Received, peer: Peer) -> None:
        await prefill(request, peer)
        p.pages["/disagg/leases"] = b'{"ranks": []}'

    p.usual = computes
    checks = await examine(settings_of([p], [d]))
    assert found(checks, "KV moved").state is State.OK
    text = f"no: 127.0.0.1:{p.port} has computed the prompt itself"
    assert failed(checks) == {"KV moved back": text}


@pytest.mark.parametrize(
    ("change", "state", "text"),
    [
        ("none", State.OK, "yes, 128 of 512 tokens"),
        ("evicted", State.FAIL, "no: 127.0.0.1:{} has computed the prompt itself"),
        ("failing", State.FAIL, "no: 127.0.0.1:{} answers 500: no"),
        ("no lender", State.SKIPPED, "no engine lends its prefix cache"),
        ("no borrower", State.SKIPPED, "no engine of the same group borrows"),
        ("one unhealthy", State.SKIPPED, "no engine of the same group borrows"),
        (
            "other keys",
            State.SKIPPED,
            "no engine of the same group borrows from the engines that lend, "
            "or they name blocks differently: sha256 16; sha256 32",
        ),
    ],
)
async def test_a_loan_between_two_prefill_engines_is_tested(
    p: MockEngine, d: MockEngine, p2: MockEngine, change: str, state: State, text: str
) -> None:
    """The mock engines count four ids as one token."""
    lending = LendingEngines()
    lending.rank |= {"lends": change != "no lender", "borrows": change != "no borrower"}
    if change == "evicted":
        lending.rank["remote_engine_id"] = "empty"
        lending.prompts["empty"] = []
    lending.rank["loan_scheme"] = "sha256 16"
    lending.add(p, "p-1")
    if change == "other keys":
        lending.rank["loan_scheme"] = "sha256 32"
    lending.add(p2, "p-2")
    if change == "failing":
        p2.usual = fails
    p2.healthy = change != "one unhealthy"
    check = found(await examine(settings_of([p, p2], [d])), "prefix borrowed")
    tested = (p2 if change == "failing" else p).port
    assert (check.state, check.text[: len(text.format(tested))]) == (state, text.format(tested))
    assert ("can it reach the side channel" in check.cure) == (state is State.FAIL)
    if state is State.OK:
        assert check.subject == f"127.0.0.1:{p2.port} -> 127.0.0.1:{p.port}"
        (params,) = [one.json["kv_transfer_params"] for one in p.requests if b"holders" in one.body]
        assert params["holders"][0]["remote_engine_id"] == "p-2"


@pytest.mark.parametrize(
    ("other", "name", "text"),
    [
        (page({"num_layers": "36"}), "engines differ", "num_layers 28 and 36"),
        (page(transfer_modes=["push"]), "engines differ", "transfer modes pull and push"),
        (
            NO_CONNECTOR_PAGE,
            "identity",
            "started without --kv-transfer-config, so no KV moves",
        ),
        (page(lease_seconds=600), "leases", "renews them as if they lasted 600 s"),
        (page(side_channel_secret="required"), "secret", "but at other engines"),
    ],
)
async def test_first_field_that_differs_is_named(
    p: MockEngine, d: MockEngine, other: dict[str, Any], name: str, text: str
) -> None:
    p.identity, d.identity = page(), other
    assert text in failed(await examine(settings_of([p], [d])))[name]


async def test_no_request_is_sent_through_engines_that_differ(p: MockEngine, d: MockEngine) -> None:
    p.identity, d.identity = page(), page({"dtype": "float16"})
    checks = await examine(settings_of([p], [d]))
    assert found(checks, "KV moved").state is State.SKIPPED
    assert not p.requests
    assert not d.requests


async def test_each_reason_why_no_kv_moved_is_told(p: MockEngine, d: MockEngine) -> None:
    checks = await examine(settings_of([p], [d]))
    assert "do not report transfers" in found(checks, "KV moved").text
    assert "cannot be compared" in found(checks, "engines agree").text
    d.pages["/disagg/leases"] = b'{"ranks": []}'
    text = failed(await examine(settings_of([p], [d])))["KV moved"]
    assert text == f"no: 127.0.0.1:{d.port} has computed the prompt itself"
    p.usual = usual_decode
    text = failed(await examine(settings_of([p], [d])))["KV moved"]
    assert text == f"no: 127.0.0.1:{p.port} sends no kv_transfer_params"
    p.usual, d.usual = usual_prefill, answering(500, {"error": {"message": "the KV is gone"}})
    assert "no: " in failed(await examine(settings_of([p], [d])))["KV moved"]


@pytest.mark.parametrize(
    ("more", "state", "text"),
    [(64, State.OK, "yes, 64 tokens"), (0, State.SKIPPED, "may have computed the prompt itself")],
)
async def test_stock_decode_engine_shows_by_its_metrics_whether_kv_moved(
    p: MockEngine, d: MockEngine, more: int, state: State, text: str
) -> None:
    def count(loaded: int) -> None:
        d.pages["/metrics"] = b"".join(
            b'vllm:prompt_tokens_by_source_total{engine="0",source="%b"} %d.0\n' % (source, tokens)
            for source, tokens in ((b"local_compute", 70), (b"external_kv_transfer", loaded))
        )

    async def decode(request: Received, peer: Peer) -> None:
        count(1000 + more)
        await usual_decode(request, peer)

    count(1000)
    d.usual = decode
    check = found(await examine(settings_of([p], [d])), "KV moved")
    assert check.state is state
    assert text in check.text


async def test_sglangs_engines_are_checked_with_a_request_in_a_room(
    p: MockEngine, d: MockEngine
) -> None:
    rooms = Rooms()
    SGLangEngine(p, PREFILL, rooms)
    SGLangEngine(d, DECODE, rooms)
    checks = await examine(settings_of([p], [d]))
    assert not failed(checks)
    assert [one.text for one in checks if one.name == "KV protocol"] == ["sglang"] * 3
    assert found(checks, "KV moved").text.startswith("yes")


async def test_sglangs_engine_in_the_wrong_role_is_named(p: MockEngine, d: MockEngine) -> None:
    rooms = Rooms()
    SGLangEngine(p, DECODE, rooms)
    SGLangEngine(d, NULL, rooms)
    wrong = [one for one in await examine(settings_of([p], [d])) if one.state is State.FAIL]
    assert [one.text for one in wrong if one.name == "KV protocol"] == [
        "disaggregation_mode decode, but the router uses it as prefill engine",
        "disaggregation_mode null, but the router uses it as decode engine",
    ]


async def test_mooncakes_prefill_engine_without_its_bootstrap_server_is_named(
    p: MockEngine, d: MockEngine
) -> None:
    (free,) = find_free_ports(1)
    settings = settings_of([p], [d], kv_protocol="mooncake", bootstrap_port=free)
    text = failed(await examine(settings))["KV protocol"]
    assert text == f"no bootstrap server of Mooncake at 127.0.0.1:{free}"


async def test_engine_that_cannot_be_reached_is_one_line_and_others_are_checked(
    p: MockEngine, d: MockEngine
) -> None:
    (free,) = find_free_ports(1)
    settings = Settings(
        prefill=(f"127.0.0.1:{p.port}", "no-such-name.invalid:8100"),
        decode=(f"127.0.0.1:{d.port}", f"127.0.0.1:{free}"),
    )
    checks = await examine(settings)
    wrong = failed(checks)
    assert "no-such-name.invalid cannot be resolved" in wrong["name"]
    assert f"http://127.0.0.1:{free}: connection refused" in wrong["port"]
    assert set(wrong) == {"name", "port"}
    assert len([one for one in checks if one.name == "health"]) == 2


@pytest.mark.parametrize("kind", ["unhealthy", "silent", "stranger"])
async def test_engine_that_is_not_well_is_named(
    monkeypatch: pytest.MonkeyPatch, p: MockEngine, d: MockEngine, kind: str
) -> None:
    settings = settings_of([p], [d])
    if kind == "unhealthy":
        d.healthy = False
        assert failed(await examine(settings))["health"] == "/health answers 503"
    elif kind == "silent":
        d.is_mute = True
        monkeypatch.setattr("router.commands.doctor.checks.CHECK_TIMEOUT_S", 0.5)
        assert "did not answer in time" in failed(await examine(settings))["answers"]
    else:
        port = d.port
        await d.stop()

        async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"220 mail.example ESMTP\r\n")
            writer.close()

        async with await asyncio.start_server(speak, "127.0.0.1", port):
            assert "answers" in failed(await examine(settings))


async def test_engine_that_compresses_its_answers_is_named(p: MockEngine, d: MockEngine) -> None:
    async def compresses(_: Received, peer: Peer) -> None:
        await peer.answer(b"\x1f\x8b", headers={"content-encoding": "gzip"})

    d.usual = compresses
    check = found(await examine(settings_of([p], [d])), "KV moved")
    assert check.state is State.FAIL
    assert "the engine's answer is compressed with gzip although the request" in check.text
    assert "turn off compression at the engine" in check.cure


async def test_models_that_only_one_role_serves_are_named(p: MockEngine, d: MockEngine) -> None:
    p.models, d.models = ["m", "only-p"], ["m", "only-d"]
    checks = await examine(settings_of([p], [d]))
    assert failed(checks)["models"].startswith("only-p: served by prefill engines alone")
    assert any("only-d" in one.text and one.state is State.SKIPPED for one in checks)


async def test_side_channel_that_names_its_own_machine_is_named(
    p: MockEngine, d: MockEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    p.identity = at(find_free_ports(1)[0])
    checks = await examine(settings_of([p], [d]))
    assert "cannot be reached from here" in found(checks, "side channel").text
    assert found(checks, "side channel").state is State.SKIPPED
    loopback = "router.commands.doctor.checks.is_loopback"
    seen = cycle([True, False])
    monkeypatch.setattr(loopback, lambda host: next(seen))
    assert "their own machine" in failed(await examine(settings_of([p], [d])))["side channel"]


async def test_each_engine_takes_part_in_a_request(
    p: MockEngine, d: MockEngine, p2: MockEngine, d2: MockEngine, d3: MockEngine
) -> None:
    await examine(settings_of([p, p2], [d, d2, d3]))
    assert [len(one.requests) for one in (d, d2, d3)] == [1, 1, 1]
    assert p.requests
    assert p2.requests


@pytest.mark.parametrize(
    ("offset", "text"),
    [(0, "agrees"), (3, "agrees"), (-3, "agrees"), (60, "ahead of"), (-60, "behind")],
)
def test_clock_is_compared_with_the_date_of_an_answer(offset: float, text: str) -> None:
    result, moment = Findings("x"), time.time()
    date = email.utils.formatdate(moment + offset, usegmt=True).encode()
    check_clock(result, [(b"date", date)], moment, moment + 0.1)
    assert text in result.checks[0].text
    assert (result.checks[0].state is State.FAIL) == (abs(offset) > 5)


@pytest.mark.parametrize("headers", [[], [(b"date", b"\xff")], [(b"date", b"yesterday")]])
def test_answer_without_a_date_shows_no_clock(headers: list[tuple[bytes, bytes]]) -> None:
    result = Findings("x")
    check_clock(result, headers, 0.0, 0.0)
    assert not result.checks


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    for name in ("keys.yaml", "cert.pem", "key.pem"):
        (tmp_path / name).write_text("nonsense: [")
    settings = Settings(
        prefill=("h:1",),
        decode=("h:2",),
        api_keys_file=tmp_path / "keys.yaml",
        tls_certfile=tmp_path / "cert.pem",
        tls_keyfile=tmp_path / "key.pem",
        engine_ca_file=tmp_path / "absent.pem",
        engine_api_key_file=tmp_path / "absent",
    )
    names = {one.name for one in check_files(settings) if one.state is State.FAIL}
    assert names == {"API keys", "TLS", "TLS to engines", "--engine-api-key"}


@pytest.mark.parametrize("unproven", ["tokens", "off", "whole", "prompt"])
def test_reuse_by_messages_is_reported_as_unsafe(unproven: Any) -> None:
    settings = Settings(prefill=("h:1",), decode=("h:2",), conversation_unproven=unproven)
    found = [one.name for one in check_files(settings) if one.state is State.FAIL]
    assert found == ["--conversation-unproven"] * (unproven in UNSAFE_REUSE)


async def test_redis_that_does_not_answer_is_named() -> None:
    (free,) = find_free_ports(1)
    url = f"redis://user:hidden@127.0.0.1:{free}"
    settings = Settings(prefill=("h:1",), decode=("h:2",), conversation_store=url)
    (check,) = await check_redis(settings)
    assert (check.name, check.state) == ("conversation store", State.FAIL)
    assert "hidden" not in check.text


async def doctor(*argv: str) -> int:
    """Run the command in a thread: it has an event loop of its own."""
    return await asyncio.to_thread(main, argv)


async def test_exit_status_and_json(
    p: MockEngine, d: MockEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    p.identity = d.identity = page()
    moves_kv(p)
    moves_kv(d)
    engines = ["--prefill", f"127.0.0.1:{p.port}", "--decode", f"127.0.0.1:{d.port}"]
    assert await doctor(*engines) == 0
    output = capsys.readouterr().out
    assert "KV moved" in output
    assert output.startswith("no check failed\n")
    assert "\x1b" not in output
    d.identity = NO_CONNECTOR_PAGE
    assert await doctor(*engines, "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    states = {one["state"] for one in report["checks"]}
    assert states <= {"OK", "FAIL", "skipped"}
    assert all(one["cure"] for one in report["checks"] if one["state"] == "FAIL")


@pytest.mark.parametrize(
    "argv",
    [
        ["--decode", "h:1"],
        ["--no-such-option"],
        ["--timeout", "0"],
        ["http://r:1", "--prefill", "h:1", "--decode", "h:2"],
        ["http://r:1/path"],
        ["ftp://r"],
    ],
)
def test_wrong_usage_has_status_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2


async def test_running_router_is_checked_by_its_url(
    start_router: StartRouter, p: MockEngine, d: MockEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    p.identity = d.identity = page()
    # The decode engine would compute any other prompt of this size itself.
    p.identity["ranks"][0] |= RANK
    moves_kv(p)
    moves_kv(d)
    router = await start_router(target_itl=0.05)
    await router.knows_its_engines()
    assert await doctor(router.url) == 0, capsys.readouterr().out
    output = capsys.readouterr().out
    assert "requests are answered" in output
    assert output.count("yes, 4 blocks") == 3, "through the router, directly and back"


async def test_a_group_in_which_every_engine_has_both_roles_is_well(
    start_router: StartRouter, p: MockEngine, d: MockEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    for engine in (p, d):
        engine.identity = at(engine.port)
        engine.identity["ranks"][0] |= RANK | {
            "target_itl_ms": 50.0,
            "step_model": STEP_MODEL | {"mixing": 0.1},
        }
        moves_kv(engine)
    router = await start_router(ps=[p, d], ds=[p, d], target_itl=0.05)
    await router.knows_its_engines()
    RoleKeeper(router.gateway.fleet, 0.05).update(0.0)
    assert router.gateway.fleet.free_groups
    assert await doctor(router.url) == 0, capsys.readouterr().out
    assert router.metric("decode_only_total", reason="cheapest") == 0, "the request moves KV"


async def test_a_single_engine_of_both_roles_is_well(
    start_router: StartRouter, p: MockEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    p.identity, p.usual = at(p.port), usual_decode
    p.pages["/disagg/leases"] = b'{"ranks": []}'
    router = await start_router(ps=[p], ds=[p])
    await router.knows_its_engines()
    assert await doctor(router.url) == 0, capsys.readouterr().out
    assert "there is one engine" in capsys.readouterr().out


async def test_fault_that_a_running_router_reports_is_shown(
    start_router: StartRouter, p: MockEngine, d: MockEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    p.identity, d.identity = page(), NO_CONNECTOR_PAGE
    router = await start_router(without_prefiller="decode")
    assert await doctor(router.url, "--json") == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    told = [one["text"] for one in checks if one["state"] == "FAIL" and one["subject"] == "router"]
    assert any("was started without --kv-transfer-config" in text for text in told)


async def test_wrong_kv_that_a_running_router_has_found_is_shown(
    start_router: StartRouter, p: MockEngine, d: MockEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    router = await start_router()
    await router.knows_its_engines()
    canary = router.gateway.metrics.kv_canary
    prefiller, decoder = router.engine(p).name, router.engine(d).name
    canary.add(("agreed",), 3)
    await doctor(router.url)
    assert "3 compared first tokens agree" in capsys.readouterr().out
    canary.add(("disagreed",), 1)
    pairs = router.gateway.fleet.unreachable_pairs
    pairs.record_failure(prefiller, decoder, now(), is_silent=True)
    assert await doctor(router.url) == 1
    output = capsys.readouterr().out
    assert "1 of 4 compared first tokens were of wrong KV" in output
    assert f"{prefiller} -> {decoder} is avoided" in output


async def test_engine_that_only_the_router_reaches_is_no_failure(
    start_router: StartRouter,
    d: MockEngine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    router = await start_router(health_interval=60)
    await router.knows_its_engines()
    connect = checks_module.connect

    async def refused(host: str, port: int) -> str:
        return "connection refused" if port == d.port else await connect(host, port)

    monkeypatch.setattr(checks_module, "connect", refused)
    assert await doctor(router.url) == 0, capsys.readouterr().out
    output = capsys.readouterr().out
    assert "connection refused (from here)" in output
    assert re.search(r"OK +router +request +answered", output)


@pytest.mark.parametrize(("status", "cure"), [(401, "--engine-api-key-file"), (404, "compatible")])
async def test_engine_that_does_not_tell_its_models_is_named(
    p: MockEngine, d: MockEngine, status: int, cure: str
) -> None:
    answer = d.answer

    async def refuse(request: Received, peer: Peer) -> None:
        if request.path == "/v1/models":
            await peer.answer(b"", status)
        else:
            await answer(request, peer)

    d.answer = refuse  # type: ignore[method-assign]
    checks = await examine(settings_of([p], [d]))
    assert f"answers {status}" in failed(checks)["models"]
    assert cure in next(one.cure for one in checks if one.name == "models" and one.cure)


async def test_engines_file_that_cannot_be_used_is_named(tmp_path: Path, p: MockEngine) -> None:
    path = tmp_path / "engines.yaml"
    path.write_text("engines: [{url: nonsense, role: prefill}]")
    checks = await examine(Settings(engines_file=path))
    assert "nonsense" in failed(checks)["file"]
    path.write_text(f"engines: [{{url: 'http://127.0.0.1:{p.port}', role: prefill}}]")
    checks = await examine(Settings(engines_file=path))
    assert failed(checks) == {"decode engines": "none is known"}


async def test_what_is_no_router_fails(p: MockEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert await doctor(f"127.0.0.1:{p.port}") == 1
    assert "is this a disagg-router?" in capsys.readouterr().out
    (free,) = find_free_ports(1)
    assert await doctor(f"http://127.0.0.1:{free}") == 1
    assert "connection refused" in capsys.readouterr().out


async def test_progress_is_shown_when_it_takes_long(
    p: MockEngine,
    d: MockEngine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("router.commands.doctor.checks.CHECK_TIMEOUT_S", 0.5)
    monkeypatch.setattr("router.commands.doctor.command.SILENT_S", 0.05)
    d.is_mute = True
    engines = ["--prefill", f"127.0.0.1:{p.port}", "--decode", f"127.0.0.1:{d.port}"]
    assert await doctor(*engines) == 1
    assert "checking 2 engines" in capsys.readouterr().err


async def test_name_look_up_that_hangs_has_a_deadline(
    p: MockEngine, d: MockEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    has_ended = threading.Event()
    real = socket.getaddrinfo

    def hang(host: str, *rest: Any, **options: Any) -> Any:
        if host == "slow.invalid":
            has_ended.wait(20)
            raise socket.gaierror("too late")
        return real(host, *rest, **options)

    monkeypatch.setattr("router.commands.doctor.checks.CHECK_TIMEOUT_S", 0.2)
    monkeypatch.setattr(socket, "getaddrinfo", hang)
    settings = Settings(prefill=("slow.invalid:1",), decode=(f"127.0.0.1:{d.port}",))
    assert "no answer in" in failed(await examine(settings))["name"]
    has_ended.set()


def test_lines_are_aligned_and_coloured_on_a_terminal() -> None:
    checks = [
        Check("fleet", "models", State.OK, "m"),
        Check("decode d:1", "KV moved", State.FAIL, "no", "look"),
    ]
    plain = list(lines(checks))
    assert plain[0] == "1 of 2 checks failed"
    assert plain[1] == "OK       fleet       models    m"
    assert plain[2] == "FAIL     decode d:1  KV moved  no. To do: look"
    assert "\x1b[31mFAIL" in list(lines(checks, paint))[2]
