"""disagg-router drill: drains, freezes and kills an engine under streams of its own.

Exit code 0: all streams were right, and the fleet was whole again after each step. 1: it was not
so, or the drill could not begin. 2: wrong usage. 130: Ctrl-C.

The steps follow each other, each with its own streams: drain by the admin API, and freeze and kill
by commands of the operator. A step ends when as many engines of the role are ready as before, and
each prompt has been answered once more. Whatever ends the drill, a drained engine serves again and
a frozen one is thawed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from router.commands.bench.command import target_of
from router.commands.console import (
    DEFAULT_URL,
    CommandError,
    CommandParser,
    UsageError,
    number_in,
    paint_for,
    run_with_progress,
)
from router.commands.drain import (
    MAX_FAILED_POLLS,
    TOKEN,
    TOKEN_FILE,
    AdminClient,
    add_engine,
    admin_clients,
    drain_action,
    engine_name,
    post_to_all,
)
from router.commands.drill.report import Report, Step
from router.commands.drill.streams import DrillClient, Reference, Verdict, prompts
from router.commands.router_client import API_KEY, first_model, key_headers, router_url
from router.common.child_processes import handling_signals
from router.fleet.engine import BOTH, Health, Intent
from router.openai.answers import count_in
from router.settings import ADMIN_URL

POLL_INTERVAL_S = 0.2
# The longest wait until an engine has a stream, until routers notice that it is lost, and until a
# command has ended.
START_TIMEOUT_S, NOTICE_TIMEOUT_S, COMMAND_TIMEOUT_S = 30.0, 30.0, 120.0
MAX_OUTPUT_TEXT = 300
# What commands may name; see run_command.
NAMES, PLACEHOLDER = ("name", "host", "port"), re.compile(r"(?<!\$)\{(\w+)\}")
DESCRIPTION = f"""\
Drains an engine while streams of the drill run, and with --freeze and --kill freezes and kills it.
Each stream is compared with the answer that its prompt had before. Requests of clients at that
engine meet the same fault, but the drill neither reads nor changes them.

Commands run in a shell. {{name}}, {{host}} and {{port}} in them stand for the engine:

  --kill 'kubectl delete pod --force --field-selector status.podIP={{host}}'
  --freeze 'ssh {{host}} pkill -STOP -f vllm' --thaw 'ssh {{host}} pkill -CONT -f vllm'

The API key is in {API_KEY}; {ADMIN_URL}, {TOKEN} and {TOKEN_FILE} are as for drain.
"""
# Options with a number: the largest one, the default, and the help text.
COUNTS = {
    "streams": (256, 8, "Streams at a time, each with a prompt of its own"),
    "tokens": (100_000, 128, "Tokens of an answer"),
    "words": (100_000, 100, "Words of a prompt"),
}


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("disagg-router drill", DESCRIPTION)
    add = parser.add_argument
    add_engine(parser)
    add("--router", default=DEFAULT_URL, metavar="URL", help=f"(default: {DEFAULT_URL})")
    text = "Drain the engine and end the drain (the default)."
    add("--drain", action=argparse.BooleanOptionalAction, default=True, help=text)
    add("--migrate", action="store_true", help="The drain moves streams to other engines.")
    add("--freeze", metavar="COMMAND", help="Stops the engine's processes; needs --thaw.")
    add("--thaw", metavar="COMMAND", help="Lets them continue.")
    add("--kill", metavar="COMMAND", help="Kills the engine. Something must start it again.")
    for name, (most, usual, text) in COUNTS.items():
        kind, shown = number_in(1, most, int), f"{text} (default: {usual})."
        add(f"--{name}", type=kind, default=usual, metavar="N", help=shown)
    add("--model", metavar="NAME", help="Default: the router's first model.")
    text = "Ask for token ids and compare them, not texts. Clients seldom ask for ids."
    add("--token-ids", action="store_true", help=text)
    seconds = number_in(0.001, 1e6, unit="s")
    text = "Longest wait for an answer (default: 120 s)."
    add("--timeout", type=seconds, default=120.0, metavar="SECONDS", help=text)
    text = "Longest wait until drained, and until ready again (default: 600 s)."
    add("--ready-timeout", type=seconds, default=600.0, metavar="SECONDS", help=text)
    add("--force", action="store_true", help="Begin even if no other engine of the role is ready.")
    add("--format", choices=("text", "markdown", "json"), default="text", help="of the result")
    options = parser.parse_args(argv)
    with handling_signals((signal.SIGTERM, signal.SIGHUP), signal.default_int_handler):
        return parser.run(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    if bool(options.freeze) != bool(options.thaw):
        raise UsageError("give --freeze and --thaw, or neither")
    commands = {"freeze": options.freeze, "thaw": options.thaw, "kill": options.kill}
    if not options.drain and not any(commands.values()):
        raise UsageError("nothing to do: give --freeze and --thaw, or --kill")
    for command in filter(None, commands.values()):
        if unknown := [name for name in PLACEHOLDER.findall(command) if name not in NAMES]:
            raise UsageError(
                f"unknown {{{unknown[0]}}} in {command!r}: there are {{name}}, {{host}}, {{port}}"
            )
    name, admins = engine_name(options.engine), admin_clients(options.admin)
    headers, url = key_headers(os.environ), router_url(options.router)
    target = target_of(url, headers)
    fleet = DrilledFleet(admins, name)
    fleet.check(options.force)
    model = options.model or first_model(url, headers)
    client = DrillClient(target, model, options.tokens, options.timeout, options.token_ids)
    drill = Drill(fleet, client, options.ready_timeout, drain_action(options.migrate))
    asked = prompts(options.streams, options.words, seed=1)
    try:
        steps = asyncio.run(
            run_with_progress(drill.run(asked, options.drain, commands), drill.progress)
        )
    except KeyboardInterrupt:
        print(f"interrupted: if {name} was drained or frozen, that has ended", file=sys.stderr)
        raise
    subject = f"{fleet.role} engine {name} through {url}, {options.streams} streams of {model}"
    report = Report(subject, steps)
    painted = paint_for(sys.stdout)
    print(report.show(options.format, painted), flush=True)
    return 0 if report.has_passed else 1


class DrilledFleet:
    """The drilled engine and those that stand in for it, as all routers see them."""

    def __init__(self, admins: Sequence[AdminClient], name: str) -> None:
        self.name, self._admins = name, admins
        self.role = self._group = ""
        self._since: list[object] = []
        self._num_ready = 0

    def check(self, is_forced: bool) -> None:
        """Read the engine's role, and how many are ready. Raises CommandError if the drill must not
        begin."""
        for admin, engines in zip(self._admins, self._engines(), strict=True):
            engine = self._find(engines)
            if engine is None:
                raise admin.unknown_engine(self.name, engines)
            if not _is_ready(engine):
                state = f"{engine.get('health')}, {engine.get('intent')}"
                raise CommandError(f"{self.name} is not ready: {state} ({admin.url})")
            self.role, self._group = str(engine.get("role")), str(engine.get("group"))
            ready = self._count_ready(engines)
            if ready < 2 and not is_forced:
                text = f"no other {self.role} engine of group {self._group} is ready"
                raise CommandError(f"{text}, so nothing takes its place; --force begins anyway")

    def begin_step(self) -> int:
        """Remember the state before a step. Return the number of legs that run at the engine."""
        views = self._engines()
        found = [self._find(engines) or {} for engines in views]
        self._since = [engine.get("since") for engine in found]
        self._num_ready = min(map(self._count_ready, views))
        return sum(count_in(engine, "in_flight") or 0 for engine in found)

    def is_drained(self) -> bool:
        found = [self._find(engines) for engines in self._engines()]
        return all(engine is not None and engine.get("drained") is True for engine in found)

    def is_noticed(self) -> bool:
        """Return True if each router has seen that the engine is lost, maybe for a moment."""
        found = [self._find(engines) for engines in self._engines()]
        pairs = zip(found, self._since, strict=True)
        return all(e is None or not _is_ready(e) or e.get("since") != at for e, at in pairs)

    def is_whole(self) -> bool:
        """Return True if each router has as many ready engines of the role as before, and the
        drilled one is ready if it is still listed: in Kubernetes, another takes its place."""
        views = self._engines()
        found = [self._find(engines) for engines in views]
        are_ready = all(engine is None or _is_ready(engine) for engine in found)
        return are_ready and all(self._count_ready(one) >= self._num_ready for one in views)

    def post(self, action: str) -> None:
        """Drain or resume the engine at all routers. Raises CommandError."""
        post_to_all(self._admins, self.name, action)

    def _engines(self) -> list[list[dict[str, Any]]]:
        return [admin.engines() for admin in self._admins]

    def _find(self, engines: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        return next((engine for engine in engines if engine.get("name") == self.name), None)

    def _count_ready(self, engines: Sequence[Mapping[str, Any]]) -> int:
        roles = (self.role, BOTH)
        alike = [e for e in engines if e.get("role") in roles and e.get("group") == self._group]
        return sum(map(_is_ready, alike))


@dataclass(slots=True)
class Drill:
    """Runs the steps. `ready_timeout` is in seconds, `drain` the admin API's action."""

    fleet: DrilledFleet
    client: DrillClient
    ready_timeout: float
    drain: str = "drain"
    steps: list[Step] = field(default_factory=list)
    _doing: str = "asking for undisturbed answers"
    _began: float = field(default_factory=time.monotonic)

    def progress(self) -> str:
        counts = self.steps[-1].tally.counts if self.steps else {}
        seen = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        streams = f"; streams: {seen}" if seen else ""
        return f"{self._doing} ({time.monotonic() - self._began:.0f} s){streams}"

    async def run(
        self, asked: Sequence[str], drains: bool, commands: Mapping[str, str | None]
    ) -> Sequence[Step]:
        """Return what each step has done. Raises CommandError without undisturbed answers."""
        references: list[Reference] = []
        for number, prompt in enumerate(asked, 1):
            self._doing = f"asking for undisturbed answers, {number} of {len(asked)}"
            references.append(await self.client.learn(prompt))
        actions = {
            "drain": (drains, self._drain),
            "freeze": (commands["freeze"], lambda step: self._freeze(step, commands)),
            "kill": (commands["kill"], lambda step: self._kill(step, commands)),
        }
        for name, (is_wanted, act) in actions.items():
            step = Step(name, "" if is_wanted else f"no --{name}")
            self.steps.append(step)
            if is_wanted and all(one.result != "FAILED" for one in self.steps[:-1]):
                await self._do(step, references, act)
            elif is_wanted:
                step.skipped = "a step before it has failed"
        return self.steps

    async def _do(
        self,
        step: Step,
        references: Sequence[Reference],
        act: Callable[[Step], Awaitable[None]],
    ) -> None:
        ending = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.client.run(references, step.tally, ending))
            try:
                await self._wait_for_legs(step)
                began = time.monotonic()
                await act(step)
                await self._wait(step, "ready again", self.fleet.is_whole, self.ready_timeout)
                step.ready_s = time.monotonic() - began
            except CommandError as error:
                step.problem = str(error)
            self._doing = f"{step.name}: last streams"
            ending.set()
        try:
            await self.client.confirm(step.tally)
        except CommandError as error:
            step.problem = step.problem or str(error)

    async def _wait_for_legs(self, step: Step) -> None:
        """Wait until a leg runs at the engine. Those of prefill engines may be too short to be
        seen, so their streams are what counts."""

        def has_legs() -> bool:
            step.legs = self.fleet.begin_step()
            is_seen = step.tally.counts[Verdict.RIGHT] > 0 and self.fleet.role == "prefill"
            return step.legs > 0 or is_seen

        await self._wait(step, "busy", has_legs, START_TIMEOUT_S)

    async def _drain(self, step: Step) -> None:
        began = time.monotonic()
        try:
            await asyncio.to_thread(self.fleet.post, self.drain)
            await self._wait(step, "drained", self.fleet.is_drained, self.ready_timeout)
            step.noticed_s = time.monotonic() - began
        finally:
            await asyncio.to_thread(self.fleet.post, "resume")

    async def _freeze(self, step: Step, commands: Mapping[str, str | None]) -> None:
        try:
            await self._strike(step, commands["freeze"] or "")
        finally:
            self._doing = f"{step.name}: thawing"
            await run_command(commands["thaw"] or "", self.fleet.name)

    async def _kill(self, step: Step, commands: Mapping[str, str | None]) -> None:
        await self._strike(step, commands["kill"] or "")

    async def _strike(self, step: Step, command: str) -> None:
        began = time.monotonic()
        await run_command(command, self.fleet.name)
        what = "lost to the routers (has the command hit it?)"
        await self._wait(step, what, self.fleet.is_noticed, NOTICE_TIMEOUT_S)
        step.noticed_s = time.monotonic() - began

    async def _wait(
        self, step: Step, what: str, condition: Callable[[], bool], timeout_s: float
    ) -> None:
        """Wait until the engine is in a state. Raises CommandError."""
        self._doing = f"{step.name}: waiting until {self.fleet.name} is {what}"
        end, failed = time.monotonic() + timeout_s, 0
        while True:
            try:
                if await asyncio.to_thread(condition):
                    return
                failed = 0
            except CommandError:
                failed += 1
                if failed >= MAX_FAILED_POLLS:
                    raise
            if time.monotonic() >= end:
                raise CommandError(f"{self.fleet.name} is not {what} after {timeout_s:g} s")
            await asyncio.sleep(POLL_INTERVAL_S)


async def run_command(command: str, name: str) -> None:
    """Run an operator's shell command about an engine. Raises CommandError if it fails.

    It has a session of its own, so that Ctrl-C does not end a command that restores the engine.
    """
    host, _, port = name.rpartition(":")
    for key, value in zip(NAMES, (name, host.strip("[]"), port), strict=True):
        command = command.replace(f"{{{key}}}", shlex.quote(value))
    with tempfile.TemporaryFile() as output:
        process = await asyncio.create_subprocess_shell(
            command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            status = await asyncio.wait_for(process.wait(), COMMAND_TIMEOUT_S)
        except TimeoutError:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            text = f"`{command}` has not ended after {COMMAND_TIMEOUT_S:g} s"
            raise CommandError(text) from None
        if status:
            output.seek(0)
            text = " ".join(output.read().decode(errors="replace").split())[-MAX_OUTPUT_TEXT:]
            raise CommandError(f"`{command}` ended with status {status}: {text}")


def _is_ready(engine: Mapping[str, Any]) -> bool:
    return (engine.get("health"), engine.get("intent")) == (Health.HEALTHY, Intent.SERVING)
