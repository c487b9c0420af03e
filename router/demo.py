"""disagg-router demo: engines and a router on this machine, to see it work."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import httpx

from router.children import Child, ChildEndedError, Family
from router.parser import Parser

MODULE = [sys.executable, "-m"]
ENGINE = [*MODULE, "engine_ext.reference.cli"]
TINY_MODEL = [*MODULE, "engine_ext.reference.tiny_model"]
ROUTER = [*MODULE, "router.cli"]
KV_CONFIG = json.dumps({"kv_connector": "DisaggConnector", "kv_role": "kv_both"})
START_SECONDS = 600.0
REPORT_SECONDS = 5.0
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

RANDOM_MODEL = """\
The built-in model is random: it shows the path of a request and talks gibberish.
--model DIR takes a real Qwen3 or Llama directory from Hugging Face."""
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}
COMPLETION = {"prompt": "Once upon a time", "max_tokens": 64, "stream": True}
CURL = "  curl -N {url}{path} -H 'Content-Type: application/json' -d '{body}'\n"


class DemoError(Exception):
    """The demo cannot go on; the message says why."""


@dataclass(frozen=True, slots=True)
class Options:
    prefillers: int
    decoders: int
    host: str
    port: int
    device: str
    model: Path | None


def main(
    argv: Sequence[str], engine: Sequence[str] = ENGINE, tiny_model: Sequence[str] = TINY_MODEL
) -> int:
    """`engine` and `tiny_model` are the commands that serve a model and make one."""
    options = Options(**vars(_parser().parse_args(argv)))
    before = {number: signal.signal(number, _interrupt) for number in SIGNALS}
    try:
        run(options, list(engine), list(tiny_model))
    except KeyboardInterrupt:
        return 0
    except (DemoError, ChildEndedError) as error:
        print(f"disagg-router demo: error: {error}", file=sys.stderr)
        return 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def run(options: Options, engine: list[str], tiny_model: list[str]) -> None:
    """Runs until a signal raises KeyboardInterrupt, or a child ends: ChildEndedError."""
    _check_port(options.host, options.port)
    with tempfile.TemporaryDirectory(prefix="disagg-demo-") as directory:
        family = Family(Path(directory))
        try:
            _start_all(family, options, engine, tiny_model)
            _say(_invitation(_url(options)))
            while True:
                _check(family.children)
                time.sleep(0.5)
        finally:
            _say("Stopping.")
            with _signals_ignored():
                family.stop()


def _start_all(family: Family, options: Options, engine: list[str], tiny_model: list[str]) -> None:
    model = options.model or _make_model(family, tiny_model)
    names = [f"prefill engine {number + 1}" for number in range(options.prefillers)]
    names += [f"decode engine {number + 1}" for number in range(options.decoders)]
    ports = _free_ports(2 * len(names))
    # Several engines whose threads outnumber the cores fight each other.
    threads = max(1, (os.cpu_count() or 1) // len(names))
    command = [*engine, "--device", options.device, "--num-threads", str(threads)]
    command += _model_flags(model)
    engines = [_start_engine(family, name, command, ports) for name in names]
    _wait_until_ready(engines, "/health")
    prefillers, decoders = engines[: options.prefillers], engines[options.prefillers :]
    command = _router_command(options, prefillers, decoders)
    router = family.start("router", command, _url(options), logged=False)
    _wait_until_ready([router], "/ready", [*engines, router])


def _router_command(
    options: Options, prefillers: Sequence[Child], decoders: Sequence[Child]
) -> list[str]:
    command = [*ROUTER, "--host", options.host, "--port", str(options.port)]
    command += ["--shutdown-delay", "0", "--shutdown-timeout", "2"]
    for role, children in (("prefiller", prefillers), ("decoder", decoders)):
        ports = [child.url.rpartition(":")[2] for child in children]
        command += [f"--{role}-hosts", *["127.0.0.1"] * len(children), f"--{role}-ports", *ports]
    return command


def _make_model(family: Family, command: list[str]) -> Path:
    _say(RANDOM_MODEL)
    model = family.directory / "tiny-random"
    maker = family.start("model maker", [*command, str(model)], "")
    while maker.process.poll() is None:
        time.sleep(0.05)
    family.children.remove(maker)
    if maker.process.returncode != 0:
        maker.check()
    return model


def _model_flags(model: Path) -> list[str]:
    flags = ["--model", str(model), "--served-model-name", model.resolve().name]
    return [*flags, "--kv-transfer-config", KV_CONFIG]


def _start_engine(family: Family, name: str, command: list[str], ports: Iterator[int]) -> Child:
    port, side_channel = next(ports), next(ports)
    return family.start(
        name,
        [*command, "--host", "127.0.0.1", "--port", str(port)],
        f"http://127.0.0.1:{port}",
        VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1",
        VLLM_NIXL_SIDE_CHANNEL_PORT=str(side_channel),
        UCX_NET_DEVICES=os.environ.get("UCX_NET_DEVICES", "all"),
    )


def _wait_until_ready(
    waiting: list[Child], path: str, alive: Sequence[Child] | None = None
) -> None:
    """Raises ChildEndedError, or DemoError for a child not ready after START_SECONDS."""
    waiting, everyone = list(waiting), alive or list(waiting)
    started = reported = time.monotonic()
    with httpx.Client(trust_env=False, timeout=2.0) as client:
        while waiting:
            _check(everyone)
            now = time.monotonic()
            for child in [child for child in waiting if _answers(client, child.url + path)]:
                waiting.remove(child)
                _say(f"{child.name} is ready on {child.url} ({now - started:.0f} s)")
            names = ", ".join(child.name for child in waiting)
            if waiting and now - reported > REPORT_SECONDS:
                reported = now
                _say(f"waiting for {names} ({now - started:.0f} s)")
            if now - started > START_SECONDS:
                raise DemoError(f"not ready after {START_SECONDS:.0f} s: {names}")
            time.sleep(0.1)


def _check(children: Sequence[Child]) -> None:
    for child in children:
        child.check()


def _answers(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url).status_code == 200
    except httpx.HTTPError:
        return False


def _check_port(host: str, port: int) -> None:
    """Notices a taken port before the engines have started, which takes a while."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        raise DemoError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error


def _free_ports(count: int) -> Iterator[int]:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in held:
            sock.bind(("127.0.0.1", 0))
        return iter([sock.getsockname()[1] for sock in held])


def _invitation(url: str) -> str:
    chat = CURL.format(url=url, path="/v1/chat/completions", body=json.dumps(CHAT))
    completion = CURL.format(url=url, path="/v1/completions", body=json.dumps(COMPLETION))
    return f"\nReady. Try, in another terminal:\n\n{chat}\n{completion}\nCtrl-C stops everything.\n"


def _url(options: Options) -> str:
    host = "localhost" if options.host in ("127.0.0.1", "0.0.0.0") else options.host
    return f"http://{host}:{options.port}"


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    """Stopping is bounded, and must not stop halfway."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    print(text, flush=True)


def _count(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 16:
        raise ValueError(text)
    return number


def _model(text: str) -> Path:
    path = Path(text)
    if not (path / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"{text} is no model directory: it has no config.json")
    return path


def _parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="disagg-router demo",
        description="Starts prefill and decode engines and a router on this machine.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--prefillers", type=_count, default=1, metavar="N", help="prefill engines")
    made.add_argument("--decoders", type=_count, default=1, metavar="M", help="decode engines")
    made.add_argument("--host", default="127.0.0.1", help="address of the router")
    made.add_argument("--port", type=int, default=8000, help="port of the router")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the engines")
    made.add_argument(
        "--model",
        type=_model,
        metavar="DIR",
        help="a Qwen3 or Llama directory; without it a random model is made",
    )
    return made
