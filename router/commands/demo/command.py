"""disagg-router demo: starts engines and a router on this machine, and stops them at the end.

Exit code 0: stopped by a signal. 1: failed. 2: wrong usage, or something is not installed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from router.commands.console import CommandError, CommandParser, number_in
from router.commands.demo.engines import (
    ENGINES,
    TARGET_ITL_S,
    TINY,
    DemoModel,
    DemoOptions,
    EngineBuilder,
    EngineCommands,
    choose_model,
    free_ports,
    print_now,
    router_command,
    threads_of,
    wait_until_ready,
    write_secret,
)
from router.common.child_processes import (
    ChildEndedError,
    ChildProcess,
    ChildProcesses,
    handling_signals,
)

PROGRAM = "disagg-router demo"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
CHECK_INTERVAL_S = 0.5
DESCRIPTION = "Starts prefill and decode engines and a router on this machine."
# An engine that ends more often than this is broken.
MAX_RESTARTS = 5
RESTART_WINDOW_S = 60.0
JSON = "-H 'Content-Type: application/json'"
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
NEXT_QUESTION = "Which river flows through it?"
PATH = "/v1/chat/completions"


def main(argv: Sequence[str], engines: EngineCommands = ENGINES) -> int:
    parser = _parser()
    options = DemoOptions(**vars(parser.parse_args(argv)))
    with handling_signals(SIGNALS, signal.default_int_handler):
        try:
            return parser.run(lambda: _run(options, engines))
        except ChildEndedError as error:
            print(f"{PROGRAM}: error: {error}", file=sys.stderr)
            return 1


def _run(options: DemoOptions, engines: EngineCommands) -> int:
    """Run until a signal raises KeyboardInterrupt, or the router ends.

    Raises ChildEndedError, CommandError and UsageError.
    """
    engines.check(options)
    _check_port(options.host, options.port)
    with _log_directory() as directory:
        processes = ChildProcesses(directory)
        try:
            model = choose_model(processes, options, engines)
            threads = threads_of(options.prefillers + options.decoders)
            secret = write_secret(processes.directory)
            builder = EngineBuilder(engines, options, model, threads, secret)
            _start_all(processes, builder)
            print_now(_invitation(options.url, model, processes.children))
            restarts = EngineRestarts()
            while True:
                *started, router = processes.children
                router.check()
                restarts.restart_ended(started)
                time.sleep(CHECK_INTERVAL_S)
        except KeyboardInterrupt:
            return 0
        finally:
            # Stopping takes a bounded time.
            with handling_signals(SIGNALS, signal.SIG_IGN):
                with contextlib.suppress(OSError):  # the output may be closed
                    print_now("Stopping.")
                # The router stops first: it would report engines that stop before it as failed.
                processes.stop(processes.children[-1:])
                processes.stop()


@contextlib.contextmanager
def _log_directory() -> Iterator[Path]:
    """Yield a directory for the processes' logs. After a failure the logs stay, and a line names
    them."""
    directory = Path(tempfile.mkdtemp(prefix="disagg-demo-"))
    kept: list[Path] = []
    try:
        yield directory
    except (ChildEndedError, CommandError):
        kept = sorted(path for path in directory.glob("*.log") if path.stat().st_size)
        if kept:
            names = ", ".join(path.name for path in kept)
            print(f"{PROGRAM}: the logs are kept in {directory}: {names}", file=sys.stderr)
        raise
    finally:
        for path in directory.iterdir() if kept else ():
            if path not in kept:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not kept:
            shutil.rmtree(directory)


class EngineRestarts:
    """Starts engines again that have ended, which a person may kill to see what the router does."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: dict[str, deque[float]] = {}

    def restart_ended(self, engines: Iterable[ChildProcess]) -> None:
        """Raise ChildEndedError for an engine that has ended too often in RESTART_WINDOW_S."""
        for engine in engines:
            status = engine.process.poll()
            if status is None:
                continue
            times = self._times.setdefault(engine.name, deque(maxlen=MAX_RESTARTS))
            if len(times) == MAX_RESTARTS and self._clock() - times[0] < RESTART_WINDOW_S:
                engine.check()
            times.append(self._clock())
            engine.restart()
            log = f" (its log: {engine.log})" if status > 0 else ""  # it ended by itself
            text = f"{engine.name} ended with status {status}{log}, and starts again"
            print_now(f"{text}: {_kill(engine)}")


def _kill(engine: ChildProcess) -> str:
    return f"kill -9 {engine.process.pid}"


def _start_all(processes: ChildProcesses, builder: EngineBuilder) -> None:
    options = builder.options
    print_now(_beginning(options, builder.model, builder.threads))
    names = [f"prefill engine {number + 1}" for number in range(options.prefillers)]
    names += [f"decode engine {number + 1}" for number in range(options.decoders)]
    if options.both_roles:
        names = [f"engine {number + 1}" for number in range(len(names))]
    ports = free_ports(2 * len(names))
    started = [builder.start(processes, name, ports) for name in names]
    wait_until_ready(started, "/health", started)
    prefillers, decoders = started[: options.prefillers], started[options.prefillers :]
    target_itl = 0.0
    if options.both_roles:
        prefillers, decoders, target_itl = started, started, TARGET_ITL_S
    command = router_command(options.host, options.port, prefillers, decoders, target_itl)
    router = processes.start("router", [*command, "--ui"], options.url, logged=False)
    wait_until_ready([router], "/ready", [*started, router])


def _check_port(host: str, port: int) -> None:
    """Raise CommandError if the router's port is taken, before the engines are started."""
    try:
        socket.create_server((host, port)).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CommandError(f"cannot listen on {host}:{port}: {reason}") from error


def _beginning(options: DemoOptions, model: DemoModel, threads: int) -> str:
    lines = []
    if model.why_random:
        lines.append(f"No chat model: {model.why_random}")
    if model.is_random:
        lines.append("The model is random: it shows the path of a request and talks gibberish.")
    kind = "vLLM" if options.vllm else "reference"
    cores = f"{threads} thread{'s' * (threads > 1)} each" if options.device == "cpu" else "CUDA"
    engines = f"{options.prefillers} prefill and {options.decoders} decode engines"
    if options.both_roles:
        engines = f"{options.prefillers + options.decoders} engines of both roles"
    lines.append(f"Starting {engines} ({kind}, {cores}) with {model.name}.")
    return "\n".join(lines)


def _invitation(url: str, model: DemoModel, children: Sequence[ChildProcess]) -> str:
    """Return the text that invites to chat. `children` are the engines and the router."""
    width = max(len(child.name) for child in children)
    *engines, router = children
    places = [f"  {one.name:<{width}}  {one.url}   to kill it: {_kill(one)}" for one in engines]
    places.append(f"  {router.name:<{width}}  {router.url}")
    survives = ""
    if sum(not one.name.startswith("prefill") for one in engines) > 1:
        survives = (
            "Kill an engine while it streams a long answer (max_tokens 2000, ignore_eos "
            "true): another one continues it, and the demo starts the killed engine again.\n\n"
        )
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    first = _curl(url, "-N", QUESTION, **stream)
    if model.is_random:
        then, second = "Another one, whole:", _curl(url, "-s", "Hello")
    else:
        then = "Its next turn, which computes only what is new:"
        second = _curl(url, "-s", QUESTION, ANSWER, NEXT_QUESTION)
    return (
        "\n" + "\n".join(places) + f"\n\nReady. Watch it, and chat: {url}/ui\n\n"
        f"Or in another terminal:\n\n{first}\n\n{then}\n\n{second}\n\n{survives}"
        f"{url}/ lists the endpoints. One line for each request follows here. "
        "Ctrl-C stops everything.\n"
    )


def _curl(url: str, option: str, *texts: str, **more: object) -> str:
    """Return a command that sends the turns of a chat, which begins with a question."""
    body = {
        "messages": [
            {"role": ("user", "assistant")[place % 2], "content": text}
            for place, text in enumerate(texts)
        ],
        "max_tokens": 64,
        "temperature": 0,
        "conversation_id": "mine",
        **more,
    }
    return f"  curl {option} {url}{PATH} {JSON} -d '{json.dumps(body)}'"


def _model(text: str) -> Path | str:
    path = Path(text)
    if text == TINY and not path.exists():
        return TINY
    if not (path / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"{text} is no model directory: it has no config.json")
    return path


def _parser() -> CommandParser:
    parser = CommandParser(PROGRAM, DESCRIPTION)
    add = parser.add_argument
    count = number_in(1, 16, int)
    add("--prefillers", type=count, default=1, metavar="N", help="prefill engines (default: 1)")
    add("--decoders", type=count, default=2, metavar="M", help="decode engines (default: 2)")
    add("--host", default="127.0.0.1", help="address of the router (default: 127.0.0.1)")
    add("--port", type=int, default=8000, help="port of the router (default: 8000)")
    devices = ("cpu", "cuda")
    add("--device", choices=devices, default="cpu", help="of the engines (default: cpu)")
    add(
        "--model",
        type=_model,
        metavar="DIR",
        help="a Qwen3 or Llama directory from Hugging Face, or tiny: a random model that "
        "talks gibberish; without it, SmolLM2-135M-Instruct is fetched once (93 MB)",
    )
    add(
        "--vllm", action="store_true", help="vLLM engines with our connector, where it is installed"
    )
    text = "all of these engines compute prompts and answers, as the load needs it"
    add("--both-roles", action="store_true", help=text)
    return parser
