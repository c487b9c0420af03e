"""The command: what is started, in which order, and how it ends.

Exit code 0: it was stopped. 1: it could not go on. 2: wrong usage, or not installed.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from router.commands.arguments import Parser
from router.commands.demo import messages
from router.commands.demo.engines import (
    ENGINES,
    Engines,
    Place,
    reference_engine,
    threads_of,
    vllm_engine,
    write_secret,
)
from router.commands.demo.errors import AbsentError, DemoError
from router.commands.demo.model import TINY, Model, choose
from router.commands.demo.options import Options
from router.commands.demo.readiness import check_port, free_ports, wait_until_ready
from router.commands.output import unwritable
from router.common.child_processes import Child, ChildEndedError, Family

PROGRAM = "disagg-router demo"
ROUTER = [sys.executable, "-m", "router.commands.cli"]
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
POLL_SECONDS = 0.5


def main(argv: Sequence[str], engines: Engines = ENGINES) -> int:
    options = Options(**vars(_parser().parse_args(argv)))
    before = {number: signal.signal(number, _interrupt) for number in SIGNALS}
    try:
        run(options, engines)
    except KeyboardInterrupt:
        return 0
    except (DemoError, ChildEndedError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, AbsentError) else 1
    except OSError as error:
        return unwritable(PROGRAM, error)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def run(options: Options, engines: Engines) -> None:
    """Runs until a signal raises KeyboardInterrupt, or a child ends: ChildEndedError."""
    engines.check(options)
    check_port(options.host, options.port)
    with tempfile.TemporaryDirectory(prefix="disagg-demo-") as directory:
        family = Family(Path(directory))
        try:
            model = choose(family, options, engines)
            _start_all(family, options, engines, model)
            _say(messages.invitation(options.url, model, family.children))
            while True:
                _check(family.children)
                time.sleep(POLL_SECONDS)
        finally:
            with _signals_ignored():
                with contextlib.suppress(OSError):  # nobody may read it any more
                    _say("Stopping.")
                # The router first: to it, engines that go before would be engines that fail.
                family.stop_in_turn()


def _start_all(family: Family, options: Options, engines: Engines, model: Model) -> None:
    names = [f"prefill engine {number + 1}" for number in range(options.prefillers)]
    names += [f"decode engine {number + 1}" for number in range(options.decoders)]
    threads = threads_of(len(names))
    make = vllm_engine if options.vllm else reference_engine
    _say(messages.beginning(options, model, threads))
    ports = free_ports(2 * len(names))
    secret = write_secret(family.directory)
    started = []
    for name in names:
        engine = make(engines, options, model, threads, Place(next(ports), next(ports), secret))
        started.append(family.start(name, engine.command, engine.url, environment=engine.variables))
    wait_until_ready(started, "/health", _say)
    prefillers, decoders = started[: options.prefillers], started[options.prefillers :]
    command = _router_command(options, prefillers, decoders)
    router = family.start("router", command, options.url, logged=False)
    wait_until_ready([router], "/ready", _say, [*started, router])


def _router_command(
    options: Options, prefillers: Sequence[Child], decoders: Sequence[Child]
) -> list[str]:
    command = [*ROUTER, "--host", options.host, "--port", str(options.port)]
    command += ["--shutdown-delay", "0", "--shutdown-timeout", "2", "--ui"]
    for role, children in (("prefiller", prefillers), ("decoder", decoders)):
        ports = [child.url.rpartition(":")[2] for child in children]
        command += [f"--{role}-hosts", *["127.0.0.1"] * len(children), f"--{role}-ports", *ports]
    return command


def _check(children: Sequence[Child]) -> None:
    for child in children:
        child.check()


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


def _model(text: str) -> Path | str:
    path = Path(text)
    if text == TINY and not path.exists():
        return TINY
    if not (path / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"{text} is no model directory: it has no config.json")
    return path


def _parser() -> argparse.ArgumentParser:
    made = Parser(
        prog=PROGRAM,
        description="Starts prefill and decode engines and a router on this machine.",
        allow_abbrev=False,
    )
    made.add_argument(
        "--prefillers", type=_count, default=1, metavar="N", help="prefill engines (default: 1)"
    )
    made.add_argument(
        "--decoders", type=_count, default=1, metavar="M", help="decode engines (default: 1)"
    )
    made.add_argument(
        "--host", default="127.0.0.1", help="address of the router (default: 127.0.0.1)"
    )
    made.add_argument("--port", type=int, default=8000, help="port of the router (default: 8000)")
    made.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="of the engines (default: cpu)"
    )
    made.add_argument(
        "--model",
        type=_model,
        metavar="DIR",
        help="a Qwen3, Qwen2 or Llama directory from Hugging Face, or tiny: a random model that "
        "talks gibberish; without it, SmolLM2-135M-Instruct is fetched once (93 MB)",
    )
    made.add_argument(
        "--vllm", action="store_true", help="vLLM engines with our connector, where it is installed"
    )
    return made
