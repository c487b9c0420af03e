"""disagg-router: `serve` (the default), `drain`, `status`, `bench`, `key` and `demo`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from router.commands.arguments import Parser
from router.settings import (
    RENAMED,
    Settings,
    SettingsError,
    default_of,
    deprecation_warnings,
    description_of,
    flag_of,
    group_title,
    load,
    metavar_of,
    unknown_variables,
)

PROGRAM = "disagg-router"
DESCRIPTION = """\
Routes OpenAI requests to prefill and decode engines, one of each for every request.

Commands:
  serve    serve in front of running engines (the default, may be left out)
  drain    let an engine finish what it has, before it is stopped (disagg-router drain --help)
  status   show the engines, groups and load that a router sees (disagg-router status --help)
  bench    put a bounded load on a router and measure it (disagg-router bench --help)
  key      make an API key for a client of the router (disagg-router key --help)
  demo     start engines and a router on this machine, to try it (disagg-router demo --help)

Every option below can also be a variable (DISAGG_ROUTER_PORT for --port) or a line of a YAML
file (--config). An option wins over a variable, a variable over the file.
"""
EXAMPLE = """\
example:
  disagg-router --prefiller-hosts 10.0.0.1 10.0.0.2 --prefiller-ports 8100 \\
                --decoder-hosts 10.0.1.1 --decoder-ports 8200 --host 0.0.0.0
"""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["demo"]:
        from router.commands.demo.command import main as demo

        return demo(arguments[1:])
    if arguments[:1] == ["drain"]:
        from router.commands.drain import main as drain

        return drain(arguments[1:])
    if arguments[:1] == ["status"]:
        from router.commands.status.command import main as status

        return status(arguments[1:])
    if arguments[:1] == ["bench"]:
        from router.commands.bench.command import main as bench

        return bench(arguments[1:])
    if arguments[:1] == ["key"]:
        from router.commands.key import main as key

        return key(arguments[1:])
    if arguments[:1] == ["serve"]:
        arguments = arguments[1:]
    return _serve(vars(parser().parse_args(arguments)))


def parser() -> Parser:
    """The settings model as flags; values stay text, for the model to judge."""
    made = Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [serve] [options]\n       {PROGRAM} drain URL [options]\n"
        f"       {PROGRAM} status | bench [URL] [options]\n"
        f"       {PROGRAM} key NAME [options]\n"
        f"       {PROGRAM} demo [options]",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
    )
    general = made.add_argument_group("General")
    general.add_argument("-h", "--help", action="help", help="Show this and exit.")
    text = f"{PROGRAM} {version(PROGRAM)}{' (compiled)' if _is_compiled() else ''}"
    general.add_argument("--version", action="version", version=text, help="Show it and exit.")
    groups = {"General": general}
    for name in Settings.model_fields:
        title = group_title(name)
        if title not in groups:
            groups[title] = made.add_argument_group(title)
        groups[title].add_argument(*_spellings(name), dest=name, **_options(name))
    for name, current in RENAMED.items():
        options = _options(current) | {"help": argparse.SUPPRESS}
        made.add_argument(flag_of(name), dest=name, **options)
    return made


def _is_compiled() -> bool:
    """Whether this is a build of scripts/compile_router.py. Looks, and imports no module of it."""
    found = find_spec("router.http_client.engine_answer")
    return found is not None and not str(found.origin).endswith(".py")


def _spellings(name: str) -> list[str]:
    """One host may be called a host, as vLLM's example proxies have it too."""
    flag = flag_of(name)
    return [flag, flag[:-1]] if name.endswith(("_hosts", "_ports")) else [flag]


def _options(name: str) -> dict[str, Any]:
    field = Settings.model_fields[name]
    default = default_of(field)
    text = description_of(field) + (f" (default: {default})" if default else "")
    if field.annotation is bool:
        return {"action": argparse.BooleanOptionalAction, "help": text}
    options: dict[str, Any] = {"metavar": metavar_of(name), "help": text}
    if isinstance(field.default, tuple):
        options |= {"nargs": "+", "action": "extend"}
    return options


def _serve(flags: dict[str, Any]) -> int:
    # Not needed for --help, and slow to import.
    from router.fleet.sources.factory import check_sources
    from router.server import serve, supervisor
    from router.server.app import check_files
    from router.telemetry import logs

    try:
        settings = load(flags)
    except SettingsError as error:
        for problem in error.problems:
            print(f"{PROGRAM}: error: {problem}", file=sys.stderr)
        return 2
    logs.configure(settings.log_level, settings.log_format)
    logger = logging.getLogger("disagg_router")
    for line in deprecation_warnings(settings, flags):
        logger.warning("%s", line)
    for variable in unknown_variables(os.environ):
        logger.warning("%s is not a setting, and is ignored", variable)
    try:
        check_sources(settings)
        # Before anything listens.
        settings.admin_secret(), settings.ui_secret(), settings.engine_secret()
        check_files(settings)
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
