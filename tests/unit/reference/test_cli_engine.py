import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from engine_ext.reference.cli import read_settings
from engine_ext.reference.host import build_host
from engine_ext.reference.tiny_model import TinyModel, write_tiny_model

KV_CONFIG = {"kv_connector": "DisaggConnector", "kv_role": "kv_both"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), TinyModel(layers=1, max_positions=512))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--model"),
        (["--model", "/no/such/directory"], "is not a model directory"),
        (["--model", "/"], "no config.json"),
        (["--model", "MODEL", "--port", "65536"], "'65536' is not a number"),
        (["--model", "MODEL", "--port", "-1"], "--port"),
        (["--model", "MODEL", "--port", "http"], "'http' is not a number"),
        (["--model", "MODEL", "--block-size", "0"], "block_size must be at least 1"),
        (["--model", "MODEL", "--num-blocks", "1"], "num_blocks must be at least 2"),
        (["--model", "MODEL", "--max-num-seqs", "many"], "--max-num-seqs"),
        (["--model", "MODEL", "--global-cache-hit-threshold", "1.1"], "from 0 to 1"),
        (["--model", "MODEL", "--global-cache-hit-threshold", "nan"], "from 0 to 1"),
        (["--model", "MODEL", "--shutdown-timeout", "-1"], "--shutdown-timeout"),
        (["--model", "MODEL", "--frobnicate"], "--frobnicate"),
        (["--model", "MODEL", "--kv-transfer-config", "{"], "not valid JSON"),
        (["--model", "MODEL", "--kv-transfer-config", "[" * 100_000], "not valid JSON"),
        (["--model", "MODEL", "--kv-transfer-config", "[]"], "not a JSON object"),
        (["--model", "MODEL", "--kv-transfer-config", "{}"], "kv_connector"),
        (["--model", "MODEL", "--kv-transfer-config", '{"kv_connector":"Other"}'], "Other"),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, list) else "",
)
def test_a_wrong_command_line_ends_with_one_line_and_status_2(
    options: list[str], said: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(model) if option == "MODEL" else option for option in options]
    with pytest.raises(SystemExit) as ended:
        read_settings(arguments, {})
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.startswith("disagg-engine: error: ")
    assert error.count("\n") == 1
    assert said in error


def test_options_and_variables_arrive_where_they_belong(model: Path) -> None:
    extra = {"kv_connector_extra_config": {"kv_lease_duration": 3}}
    kv_config = {**KV_CONFIG, **extra, "kv_load_failure_policy": "recompute", "engine_id": "me"}
    options = (
        f"--model {model} --served-model-name a b --port 1 --seed 5 --kv-cache-memory-mib 3 "
        "--no-enable-prefix-caching --max-model-len 100 --kv-transfer-config"
    )
    settings = read_settings(
        [*options.split(), json.dumps(kv_config)], side_channel("10.0.0.1", "7")
    )
    assert settings.connector is not None
    assert (settings.connector.lease_duration, settings.connector.engine_id) == (3, "me")
    assert settings.connector.load_failure_policy == "recompute"
    assert settings.side_channel == ("10.0.0.1", 7)
    assert settings.served_model_names == ("a", "b")
    engine = settings.engine
    assert (engine.kv_cache_memory_mib, engine.seed, engine.max_model_len) == (3, 5, 100)
    assert not engine.enable_prefix_caching


def test_the_flag_decides_over_the_connectors_global_threshold(model: Path) -> None:
    extra = {"kv_connector_extra_config": {"global_cache_hit_threshold": 0.25}}
    options = ["--model", str(model), "--kv-transfer-config", json.dumps({**KV_CONFIG, **extra})]
    assert read_settings(options, {}).engine.global_cache_hit_threshold == 0.25
    options += ["--global-cache-hit-threshold", "0"]
    assert read_settings(options, {}).engine.global_cache_hit_threshold == 0


def test_the_command_line_is_read_without_torch_or_nixl() -> None:
    check = (
        "import sys, engine_ext.reference.cli;"
        "sys.exit(bool({'torch', 'nixl'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", check], timeout=60).returncode == 0


def command(model: Path, *options: str) -> list[str]:
    base = [sys.executable, "-m", "engine_ext.reference.cli", "--model", str(model)]
    small = ["--num-blocks", "32", "--num-threads", "1"]
    return [*base, "--host", "127.0.0.1", "--port", "0", *small, *options]


@contextmanager
def taken_port() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield str(listener.getsockname()[1])


def failed(model: Path, *options: str, **environment: str) -> str:
    """What an engine that cannot start says."""
    done = subprocess.run(
        command(model, *options),
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )
    lines = [line for line in done.stderr.splitlines() if " INFO " not in line]
    assert done.returncode == 2
    assert len(lines) == 1
    assert lines[0].startswith("disagg-engine: error: ")
    return lines[0]


def test_a_port_in_use_is_one_line(model: Path) -> None:
    with taken_port() as port:
        assert "Address already in use" in failed(model, "--port", port)


def side_channel(host: str, port: str) -> dict[str, str]:
    return {"VLLM_NIXL_SIDE_CHANNEL_HOST": host, "VLLM_NIXL_SIDE_CHANNEL_PORT": port}


class Running(NamedTuple):
    process: subprocess.Popen[str]
    port: int


@contextmanager
def running(model: Path, *options: str, **environment: str) -> Iterator[Running]:
    with subprocess.Popen(
        command(model, *options),
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    ) as process:
        try:
            yield Running(process, _announced_port(process))
        finally:
            process.kill()


def _announced_port(process: subprocess.Popen[str]) -> int:
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"ready on http://127\.0\.0\.1:(\d+)", line):
            return int(found[1])
    raise AssertionError("the engine did not become ready")


def _stream_forever(port: int) -> Any:
    body = {"prompt": "a", "max_tokens": 300, "ignore_eos": True, "stream": True}
    return httpx.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=30)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_requests_finish_and_ends_with_status_0(
    number: signal.Signals, model: Path
) -> None:
    with running(model) as (process, port):
        with _stream_forever(port) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(number)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(30) == 0


def test_requests_that_do_not_finish_in_time_are_cut_off(model: Path) -> None:
    with (
        running(model, "--shutdown-timeout", "0") as (process, port),
        _unfinished_request(port),
    ):
        process.terminate()
        assert process.wait(30) == 0


def test_a_second_signal_ends_the_process_at_once(model: Path) -> None:
    with (
        running(model, "--shutdown-timeout", "600") as (process, port),
        _unfinished_request(port),
    ):
        process.terminate()
        _wait_until_refused(port)
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM


def _unfinished_request(port: int) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port))
    client.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n"
        b"content-length: 9\r\n\r\n"
    )
    assert b"100 Continue" in client.recv(100)
    return client


def _wait_until_refused(port: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
        except ConnectionRefusedError:
            return
        time.sleep(0.02)
    raise AssertionError("the engine still accepts connections")


@pytest.mark.slow
def test_the_side_channel_is_what_the_kv_parameters_say(model: Path, unused_tcp_port: int) -> None:
    options = ("--kv-transfer-config", json.dumps(KV_CONFIG))
    body = {"prompt": "a" * 40, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    with running(model, *options, **side_channel("127.0.0.1", str(unused_tcp_port))) as engine:
        url = f"http://127.0.0.1:{engine.port}/v1/completions"
        params = httpx.post(url, json=body, timeout=30).json()["kv_transfer_params"]
        assert (params["remote_host"], params["remote_port"]) == ("127.0.0.1", unused_tcp_port)
        assert len(params["remote_block_ids"][0]) == 2
        engine.process.terminate()
        assert engine.process.wait(30) == 0


def test_an_engine_without_connector_goes_on_and_hands_nothing_over(model: Path) -> None:
    options = ["--model", str(model), "--num-blocks", "9"]
    host = build_host(read_settings(options, {}))
    host.engine.shutdown()
    assert "begun" in host.itself.capabilities
    assert "hand_over" not in host.itself.capabilities
    assert set(host.itself.renders) == {"model", "tokenizer", "chat_template"}
