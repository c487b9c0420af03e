"""The command disagg-router: `serve` (the default) and the commands of COMMANDS."""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

from router.commands.console import CommandParser
from router.common.did_you_mean import did_you_mean
from router.settings import (
    RENAMED,
    Settings,
    SettingsError,
    as_yaml,
    deprecation_warnings,
    description_of,
    flag_of,
    group_title,
    load,
    metavar_of,
    read_secret,
    unit_of,
    unknown_variables,
    value_text,
)

PROGRAM = "disagg-router"
# Imports leave hardly any reference cycles behind; collections would take a tenth of the start.
GC_THRESHOLD = 50_000
DESCRIPTION = """\
Routes OpenAI requests to pairs of prefill and decode engines.

Commands:
  serve       serve in front of running engines (the default, may be left out)
  drain       wait until an engine can be stopped without failing a request
  drill       drain, freeze and kill an engine, and check that streams survive it
  status      show the engines, groups and load of a router
  doctor      check a fleet, and show what to do about each fault
  bench       put a bounded load on a router and measure it
  plan        estimate how many engines a trace needs for TTFT and ITL goals
  key         make an API key for a client of the router
  demo        start engines and a router on this machine
  chat        chat with a model behind a router, and see how each answer came
  why         show where a request spent its time, and which engines served it
  completion  print a script that completes commands and options in bash or zsh

`disagg-router COMMAND --help` shows a command's options. Every option below can also be a variable
(DISAGG_ROUTER_PORT for --port) or a line of a YAML file (--config). An option takes precedence over
a variable, a variable over the file.
"""
# A command's module is imported only if it runs.
COMMANDS = {
    "bench": "router.commands.bench.command",
    "chat": "router.commands.chat.command",
    "completion": "router.commands.completion",
    "demo": "router.commands.demo.command",
    "doctor": "router.commands.doctor.command",
    "drain": "router.commands.drain",
    "drill": "router.commands.drill.command",
    "key": "router.commands.key",
    "plan": "router.commands.plan.command",
    "status": "router.commands.status",
    "why": "router.commands.why",
}
# `--help` shows these settings; `--help-all` shows all.
COMMON_SETTINGS = (
    "config",
    "prefill",
    "decode",
    "prefiller_hosts",
    "prefiller_ports",
    "decoder_hosts",
    "decoder_ports",
    "engines_file",
    "host",
    "port",
    "workers",
    "prefill_policy",
    "conversation_store",
    "api_keys_file",
    "ui",
    "log_level",
)
EXAMPLE = """\
examples:
  disagg-router --prefill http://10.0.0.1:8100 http://10.0.0.2:8100 \\
                --decode http://10.0.1.1:8200 --host 0.0.0.0
  disagg-router --prefiller-hosts 10.0.0.1 10.0.0.2 --prefiller-ports 8100 \\
                --decoder-hosts 10.0.1.1 --decoder-ports 8200 --host 0.0.0.0
"""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else "serve"
    if command in COMMANDS:
        module = importlib.import_module(COMMANDS[command])
        return int(module.main(arguments[1:]))
    if command == "serve":
        arguments = arguments[1:]
    elif not command.startswith("-"):
        suggestion = did_you_mean(command, [*COMMANDS, "serve"])
        parser().error(f"unknown command {command}{suggestion}")
    shows_all = "--help" not in arguments and "-h" not in arguments
    return _serve(vars(parser(shows_all).parse_args(arguments)))


def parser(shows_all: bool = True, serves: bool = True) -> CommandParser:
    """Return a parser with a flag for each setting; values stay text, which the model checks.

    Its help shows all settings or only the common ones. `serves`: for `serve`, not for another
    command that reads the settings.
    """
    made = CommandParser(
        PROGRAM,
        DESCRIPTION,
        usage=f"{PROGRAM} [serve] --prefill URL ... --decode URL ... [options]\n"
        f"       {PROGRAM} COMMAND [options]",
        epilog=EXAMPLE,
        argument_default=argparse.SUPPRESS,
        add_help=False,
    )
    general = made.add_argument_group("General")
    general.add_argument("-h", "--help", action="help", help="Show the common options and exit.")
    general.add_argument("--help-all", action="help", help="Show all options and exit.")
    text = f"{PROGRAM} {version(PROGRAM)}"
    general.add_argument(
        "--version", action="version", version=text, help="Show the version and exit."
    )
    if serves:
        add_action = partial(general.add_argument, action="store_true")
        add_action("--check", help="Check the settings and the files they name, and exit.")
        add_action("--print-config", help="Print the settings as YAML, without secrets, and exit.")
    groups = {"General": general}
    for name in Settings.model_fields:
        title = group_title(name)
        if title not in groups:
            groups[title] = made.add_argument_group(title)
        flags = [flag_of(name)]
        if name.endswith(("_hosts", "_ports")):  # --decoder-host, as in vLLM's example proxies
            flags.append(flags[0][:-1])
        options = _options(name)
        if not shows_all and name not in COMMON_SETTINGS:
            options["help"] = argparse.SUPPRESS
        groups[title].add_argument(*flags, dest=name, **options)
    for name, current in RENAMED.items():
        options = _options(current) | {"help": argparse.SUPPRESS}
        made.add_argument(flag_of(name), dest=name, **options)
    return made


def _options(name: str) -> dict[str, Any]:
    field = Settings.model_fields[name]
    default = f"{value_text(field.default)} {unit_of(name)}".strip()
    text = description_of(name)
    if field.default not in (None, ()):
        text += f" (default: {default})"
    elif metavar_of(name) == "SECRET":
        text += " A variable is safer than a flag."
    if field.annotation is bool:
        return {"action": argparse.BooleanOptionalAction, "help": text}
    options: dict[str, Any] = {"metavar": metavar_of(name), "help": text}
    if isinstance(field.default, tuple):
        options |= {"nargs": "+", "action": "extend"}
    return options


def _serve(flags: dict[str, Any]) -> int:
    gc.set_threshold(GC_THRESHOLD)
    # Slow to import, and not needed for --help.
    from router.fleet.sources.factory import check_sources
    from router.server import serve, supervisor
    from router.server.app import check_files
    from router.telemetry import logs

    only_check, only_print = flags.pop("check", False), flags.pop("print_config", False)
    try:
        settings = load(flags)
        if only_print:
            print(as_yaml(settings), end="")
            return 0
        logs.configure(settings.log_level, settings.log_format)
        logger = logging.getLogger("disagg_router")
        for line in deprecation_warnings(settings, flags):
            logger.warning("%s", line)
        unknown = unknown_variables(os.environ)
        if only_check and unknown:
            raise SettingsError(unknown)
        for line in unknown:
            logger.warning("%s", line)
        check_sources(settings)
        # Report unreadable secrets and files before the router listens.
        for secret in ("admin_token", "ui_token", "engine_api_key"):
            read_secret(settings, secret)
        check_files(settings)
        if only_check:
            print("the settings are valid")
            return 0
        if settings.workers > 1:
            return supervisor.run(settings, partial(load, flags))
        serve.run(settings, partial(load, flags))
    except SettingsError as error:
        for problem in error.problems:
            print(f"{PROGRAM}: error: {problem}", file=sys.stderr)
        return 2
    except serve.BindError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
