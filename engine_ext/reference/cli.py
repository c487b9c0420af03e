"""`disagg-engine`: the command line of the reference engine.

Everything wrong with it ends in one line on stderr and exit status 2, before torch is imported
if that is possible.
"""

import argparse
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from engine_ext.common.config import ConnectorConfig
from engine_ext.reference.config import EngineConfig, ReferenceSettings
from engine_ext.reference.server.serving import SIGNALS, bind

PROGRAM = "disagg-engine"
HOST_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_HOST"
PORT_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_PORT"

_OPTION_TYPES = {
    "device": str,
    "dtype": str,
    "global_cache_hit_threshold": float,
    "target_itl_ms": float,
}
"""Types of the engine's options that are not integers."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, _line(message))


def main(arguments: Sequence[str] | None = None) -> int:
    settings = read_settings(arguments, os.environ)
    logging.basicConfig(
        level=settings.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    for number in SIGNALS:
        signal.signal(number, _exit_while_loading)
    try:
        bound = bind(settings.host, settings.port)
    except OSError as error:
        reason = error.strerror or error
        return _fail(f"cannot listen on {settings.host}:{settings.port}: {reason}")
    # Read when torch is imported. OpenMP's threads spin for a while after each product of matrices,
    # and engines that share a machine would take each other's cores that way.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        # Late, so that --help and a wrong option do not wait for torch.
        from engine_ext.reference.host import HostError, build_host
    except ImportError as error:
        return _fail(f"{error}; install the engine with: pip install 'disagg-router[engine]'")
    try:
        build_host(settings).run(bound, shutdown_timeout=settings.shutdown_timeout)
    except HostError as error:
        return _fail(str(error), error.status)
    return 0


def _fail(message: str, status: int = 2) -> int:
    sys.stderr.write(_line(message))
    return status


def _line(message: str) -> str:
    return f"{PROGRAM}: error: {' '.join(message.split())}\n"


def _exit_while_loading(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)


def read_settings(
    arguments: Sequence[str] | None, environment: Mapping[str, str]
) -> ReferenceSettings:
    """Ends the process with status 2 and one line if something is wrong."""
    parser = _parser()
    options = vars(parser.parse_args(arguments))
    try:
        text = options["kv_transfer_config"]
        connector = None if text is None else _read_connector(text)
        host = environment.get(HOST_VARIABLE) or "localhost"
        port = _number(environment.get(PORT_VARIABLE) or "5600")
        return ReferenceSettings(
            engine=_engine(options, connector),
            connector=connector,
            side_channel=(host, port),
            served_model_names=tuple(options["served_model_name"] or [options["model"]]),
            host=options["host"],
            port=options["port"],
            log_level=options["log_level"],
            shutdown_timeout=options["shutdown_timeout"],
        )
    except argparse.ArgumentTypeError as error:
        parser.error(f"{PORT_VARIABLE}: {error}")
    except ValueError as error:
        parser.error(str(error))


def _engine(options: dict[str, Any], connector: ConnectorConfig | None) -> EngineConfig:
    model = Path(options["model"])
    if not (model / "config.json").is_file():
        raise ValueError(f"--model {model} is not a model directory: it has no config.json")
    names = [field.name for field in fields(EngineConfig)]
    chosen = {name: options[name] for name in names if options.get(name) is not None}
    if connector is not None:
        chosen.setdefault("global_cache_hit_threshold", connector.global_cache_hit_threshold)
        chosen.setdefault("target_itl_ms", connector.target_itl_ms)
        chosen["hand_back"] = connector.hand_back
    return EngineConfig(**chosen | {"model": model})


def _read_connector(text: str) -> ConnectorConfig:
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--kv-transfer-config is not valid JSON: {error}") from None
    return ConnectorConfig.from_kv_transfer_config(raw)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM,
        description="A small OpenAI-compatible engine that shares its KV cache over NIXL.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--version", action="version", version=f"{PROGRAM} {version('disagg-router')}")
    add("--model", required=True, metavar="DIR", help="model directory in Hugging Face format")
    add("--served-model-name", nargs="+", metavar="NAME", help="names in the API; default: DIR")
    add("--host", default="0.0.0.0", help="default %(default)s")
    add("--port", type=_number, default=8100, help="default %(default)s; 0: any")
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction)
    for field in fields(EngineConfig):
        if text := field.metadata.get("help"):
            text += "" if field.default is None else f"; default {field.default}"
            kind = _OPTION_TYPES.get(field.name, int)
            add(f"--{field.name.replace('_', '-')}", type=kind, help=text)
    add(
        "--kv-transfer-config",
        metavar="JSON",
        help="vLLM's: kv_connector, kv_role, kv_load_failure_policy, kv_connector_extra_config; "
        f"the side channel's address is {HOST_VARIABLE}:{PORT_VARIABLE}, default localhost:5600",
    )
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    add(
        "--shutdown-timeout",
        type=_number,
        default=10,
        help="seconds that running requests may take after SIGTERM; default %(default)s",
    )
    return parser


def _number(text: str) -> int:
    """A port, or seconds."""
    if not text.isdecimal() or int(text[:6]) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 65535")
    return int(text)


if __name__ == "__main__":
    raise SystemExit(main())
