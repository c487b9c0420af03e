"""disagg-router demo: engines and a router on this machine, to see it work.

Every process it starts is its child, in a session of its own: gone when the demo ends, however it
ends. A child that ignores SIGTERM is killed; when the demo itself is killed, the kernel kills them.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import httpx

from router.parser import Parser

MODULE = [sys.executable, "-m"]
ENGINE = [*MODULE, "engine_ext.reference.cli"]
TINY_MODEL = [*MODULE, "engine_ext.reference.tiny_model"]
ROUTER = [*MODULE, "router.cli"]
KV_CONFIG = json.dumps({"kv_connector": "DisaggConnector", "kv_role": "kv_both"})
START_SECONDS = 600.0
STOP_SECONDS = 5.0
REPORT_SECONDS = 5.0
PR_SET_PDEATHSIG = 1
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


@dataclass(slots=True)
class Child:
    name: str
    process: subprocess.Popen[bytes]
    log: Path | None = None
    url: str = ""

    def check(self) -> None:
        """Raises DemoError when it has ended."""
        code = self.process.poll()
        if code is not None:
            raise DemoError(f"{self.name} ended with status {code}{self._last_lines()}")

    def _last_lines(self) -> str:
        if self.log is None:
            return ""
        lines = self.log.read_text(errors="replace").splitlines()[-15:]
        return "; its last words:\n" + "\n".join(f"  {line}" for line in lines)


@dataclass(slots=True)
class Family:
    """All children, started here and stopped here."""

    directory: Path
    engine: list[str]
    tiny_model: list[str]
    children: list[Child] = field(default_factory=list)

    def start(
        self, name: str, command: list[str], url: str, *, logged: bool = True, **variables: str
    ) -> Child:
        log = self.directory / f"{name.replace(' ', '-')}.log" if logged else None
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(log.open("wb")) if log else None
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if log else None,
                env={**os.environ, **variables},
                start_new_session=True,
                preexec_fn=_die_with(os.getpid()),
            )
        child = Child(name, process, log, url)
        self.children.append(child)
        return child

    def stop(self) -> None:
        """SIGTERM to all, SIGKILL to whoever is left after STOP_SECONDS; then nobody is."""
        for child in self.children:
            _signal(child, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for child in self.children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline - time.monotonic()))
            _signal(child, signal.SIGKILL)
            child.process.wait()


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
    except DemoError as error:
        print(f"disagg-router demo: error: {error}", file=sys.stderr)
        return 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def run(options: Options, engine: list[str], tiny_model: list[str]) -> None:
    """Runs until a signal raises KeyboardInterrupt, or a child ends: DemoError."""
    _check_port(options.host, options.port)
    with tempfile.TemporaryDirectory(prefix="disagg-demo-") as directory:
        family = Family(Path(directory), engine, tiny_model)
        try:
            _start_all(family, options)
            _say(_invitation(_url(options)))
            while True:
                _check(family.children)
                time.sleep(0.5)
        finally:
            _say("Stopping.")
            with _signals_ignored():
                family.stop()


def _start_all(family: Family, options: Options) -> None:
    model = options.model or _make_model(family)
    names = [f"prefill engine {number + 1}" for number in range(options.prefillers)]
    names += [f"decode engine {number + 1}" for number in range(options.decoders)]
    ports = _free_ports(2 * len(names))
    engines = [_start_engine(family, name, options.device, model, ports) for name in names]
    _wait_until_ready(engines, "/health")
    prefillers, decoders = engines[: options.prefillers], engines[options.prefillers :]
    command = [*ROUTER, "--host", options.host, "--port", str(options.port)]
    command += ["--shutdown-delay", "0", "--shutdown-timeout", "2"]
    for role, children in (("prefiller", prefillers), ("decoder", decoders)):
        command += [f"--{role}-hosts", *["127.0.0.1"] * len(children)]
        command += [f"--{role}-ports", *[child.url.rpartition(":")[2] for child in children]]
    router = family.start("router", command, _url(options), logged=False)
    _wait_until_ready([router], "/ready", [*engines, router])


def _make_model(family: Family) -> Path:
    _say(RANDOM_MODEL)
    model = family.directory / "tiny-random"
    maker = family.start("model maker", [*family.tiny_model, str(model)], "")
    while maker.process.poll() is None:
        time.sleep(0.05)
    family.children.remove(maker)
    if maker.process.returncode != 0:
        maker.check()
    return model


def _start_engine(
    family: Family, name: str, device: str, model: Path, ports: Iterator[int]
) -> Child:
    port, side_channel = next(ports), next(ports)
    options = {
        "--model": str(model),
        "--served-model-name": model.resolve().name,
        "--host": "127.0.0.1",
        "--port": str(port),
        "--device": device,
        "--kv-transfer-config": KV_CONFIG,
    }
    command = [*family.engine, *(word for option in options.items() for word in option)]
    return family.start(
        name,
        command,
        f"http://127.0.0.1:{port}",
        VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1",
        VLLM_NIXL_SIDE_CHANNEL_PORT=str(side_channel),
        UCX_NET_DEVICES=os.environ.get("UCX_NET_DEVICES", "all"),
    )


def _wait_until_ready(
    waiting: list[Child], path: str, alive: Sequence[Child] | None = None
) -> None:
    """Raises DemoError when a child ends, or is not ready after START_SECONDS."""
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


def _signal(child: Child, number: signal.Signals) -> None:
    """To the child's whole session: an engine may have children of its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.process.pid, number)


def _die_with(parent: int) -> Callable[[], None]:
    """Run in the child: it dies when its parent does, even by SIGKILL."""
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


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
