"""disagg-router drill, on real engines: what survives, what it reports, and what it restores."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import httpx
import pytest

from router.commands.drill.command import main
from tests.integration.processes import BOTH_WAYS, REFERENCE, Launcher, Server, family, wait_for

SOON = ("--health-interval", "0.5", "--health-timeout", "2")
SMALL = ("--streams", "4", "--tokens", "60", "--words", "20", "--ready-timeout", "60")


@dataclass(frozen=True)
class Fleet:
    """`victim` is one of two engines of its role. `restart` starts it again once it is dead."""

    launcher: Launcher
    victim: Server
    ports: tuple[int, int]
    role: str
    router: Server
    admin: str
    stack: ExitStack

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.victim.port}"

    def arguments(self, *more: str) -> list[str]:
        where = ["--router", self.router.url, "--admin", self.admin]
        return [self.name, *where, *SMALL, *more]

    def signalled(self, name: str) -> str:
        return f"kill -{name} {' '.join(map(str, family(self.victim.process.pid)))}"

    def restart(self, module: str = REFERENCE) -> None:
        self.victim.process.wait(timeout=100)
        name, ports = f"{self.role}-again", self.ports
        engine = self.launcher.engine(name, extra=BOTH_WAYS, ports=ports, module=module)
        self.stack.enter_context(engine)

    def intent(self) -> str:
        return next(one["intent"] for one in self.engines() if one["name"] == self.name)

    def engines(self) -> list[dict[str, str]]:
        answer = httpx.get(f"{self.admin}/admin/engines", verify=False)
        engines: list[dict[str, str]] = answer.json()["engines"]
        return engines

    def is_healthy(self) -> bool:
        return all(one["health"] == "healthy" for one in self.engines())


@contextmanager
def fleet(launcher: Launcher, role: str) -> Iterator[Fleet]:
    port, side_channel, admin = launcher.free_ports(3)
    with ExitStack() as stack:
        ports = port, side_channel
        victim = stack.enter_context(launcher.engine(role, extra=BOTH_WAYS, ports=ports))
        others = {
            one: [stack.enter_context(launcher.engine(one, extra=BOTH_WAYS))]
            for one in ("prefill", "decode")
        }
        others[role].append(victim)
        options = (*SOON, "--admin-port", str(admin), f"--{role}-policy", "round_robin")
        router = stack.enter_context(launcher.router(others["prefill"], others["decode"], *options))
        url = f"http://127.0.0.1:{admin}"
        made = Fleet(launcher, victim, ports, role, router, url, stack)
        wait_for(made.is_healthy, "the router has probed all engines")
        yield made


@pytest.mark.parametrize(
    ("role", "more"), [("decode", ["--token-ids", "--migrate"]), ("prefill", [])]
)
def test_streams_survive_drain_freeze_and_kill(
    launcher: Launcher, role: str, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with fleet(launcher, role) as made, ThreadPoolExecutor(1) as pool:
        again: Future[None] = pool.submit(made.restart)
        signals = {"freeze": "STOP", "thaw": "CONT", "kill": "KILL"}
        commands = [f"--{one}={made.signalled(signal)}" for one, signal in signals.items()]
        status = main(made.arguments(*commands, *more, "--format", "json"))
        report = json.loads(capsys.readouterr().out)
        assert status == 0, report
        again.result()
        assert [step["step"] for step in report["steps"]] == ["drain", "freeze", "kill"]
        for step in report["steps"]:
            assert step["result"] == "passed", report
            assert step["right"] >= 4
            assert step["noticed_seconds"] <= step["ready_seconds"]
        assert made.intent() == "serving"


def test_an_engine_that_returns_and_answers_wrongly_is_reported(
    launcher: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    with fleet(launcher, "decode") as made, ThreadPoolExecutor(1) as pool:
        again = pool.submit(made.restart, "tests.integration.wrong_tokens_engine")
        kill = ("--no-drain", "--kill", made.signalled("KILL"))
        status = main(made.arguments(*kill, "--token-ids", "--format", "markdown"))
        page = capsys.readouterr().out
        assert status == 1, page
        again.result()
    assert page.startswith("## Drill FAILED: decode engine"), page
    assert "* `kill: " in page
    assert "wrong" in page


def test_ctrl_c_ends_a_drain(launcher: Launcher) -> None:
    with fleet(launcher, "decode") as made:
        command = [sys.executable, "-m", "router.commands.cli", "drill"]
        command += made.arguments("--tokens", "1200")
        drill = subprocess.Popen(command, env=os.environ, start_new_session=True)
        try:
            wait_for(lambda: made.intent() == "draining", "the drill drains")
            drill.send_signal(signal.SIGINT)
            assert drill.wait(timeout=60) == 130
        finally:
            drill.kill()
            drill.wait(timeout=60)
        assert made.intent() == "serving"


def test_a_drill_does_not_begin_without_another_engine_or_with_a_command_that_fails(
    launcher: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    with fleet(launcher, "decode") as made:
        (single,) = [one["name"] for one in made.engines() if one["role"] == "prefill"]
        assert main([single, *made.arguments()[1:]]) == 1
        assert "no other prefill engine of group" in capsys.readouterr().err
        fails = ("--no-drain", "--kill", "echo no such pod {name}; exit 3")
        assert main(made.arguments(*fails)) == 1
        page = capsys.readouterr().out
        assert f"ended with status 3: no such pod {made.name}" in page
        for wrong in (["--freeze", "true"], ["--no-drain"], ["--kill", "kill {pid}"]):
            with pytest.raises(SystemExit) as ended:
                main(made.arguments(*wrong))
            assert ended.value.code == 2
