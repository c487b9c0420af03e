"""Compiles the router's hot path, as a hook of the build: the wheel is then of one platform.

    HATCH_BUILD_HOOK_ENABLE_CUSTOM=1 pip wheel --no-deps .   # needs gcc and Python's headers
    python scripts/compile_router.py build/compiled          # this checkout again, compiled there

The source is one: mypyc makes C of the modules below as they stand. They are compiled as one group,
for what pays is that calls among them are C calls: one by one they are slower than Python. A wheel
without the hook is pure, as editable installs are: what is compiled does not follow its source.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# What every request passes, but for what a compiled module would read otherwise: errors, and fields
# whose bounds stand in annotations (docs/development.md).
HOT = (
    "http_client/engine_answer",
    "http_client/connection",
    "http_client/deadlines",
    "http_client/pool",
    "http_client/head_cache",
    "http_client/sse",
    "proxy/leg_bodies",
    "proxy/relay",
    "proxy/dispatch",
    "proxy/gateway",
    "proxy/headers",
    "proxy/legs",
    "proxy/plan",
    "proxy/prefill_answer",
    "proxy/request",
    "proxy/turn_reuse",
    "proxy/run",
    "proxy/answer_check",
    "proxy/traced_legs",
    "conversations/conversations",
    "conversations/reuse",
    "conversations/identity",
    "conversations/prompt",
    "openai/answers",
    "routing/route",
    "server/request_reader",
    "server/response_writer",
    "server/client_connection",
)
# Seconds; it takes one minute.
PATIENCE = 900
# What a class of msgspec's does not keep when it is compiled: its options, and its fields' bounds.
LOST = re.compile(
    r"^class \w+\(\s*(?:msgspec\.)?Struct,[^)]*"
    r"|^class \w+\(\s*(?:Value|Thing),[^)]*\b(?!frozen=)\w+=[^)]*"
    r"|^.*\bMeta\(.*$",
    re.MULTILINE,
)
LEFT_OUT = shutil.ignore_patterns("__pycache__", ".*", "build", "dist", "*.so")


class CompileError(Exception):
    pass


def compile_router(root: Path, folder: Path) -> list[str]:
    """Copies `root`/router there, where mypyc sees no project, and compiles it. The paths of what
    came of it, relative to `folder`. Raises CompileError, with the compiler's last words."""
    shutil.copytree(root / "router", folder / "router", ignore=LEFT_OUT)
    for name in HOT:
        if lost := LOST.findall((folder / f"router/{name}.py").read_text(encoding="utf-8")):
            raise CompileError(f"{name}: compiled, {lost[0]} would be lost")
    command = [sys.executable, "-m", "mypyc", "--ignore-missing-imports"]
    try:
        done = subprocess.run(
            [*command, *(f"router/{name}.py" for name in HOT)],
            cwd=folder,
            env={**os.environ, "MYPYC_OPT_LEVEL": "2", "MYPYC_DEBUG_LEVEL": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
        )
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"mypyc has not ended in {PATIENCE} s") from error
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    found = [path.name for path in sorted(folder.glob(f"*{suffix}"))]  # the group's
    found += [f"router/{name}{suffix}" for name in HOT]
    lacking = [path for path in found if not (folder / path).is_file()]
    if done.returncode or lacking or len(found) == len(HOT):
        raise CompileError("\n".join(done.stdout.splitlines()[-20:]))
    return found


class CompiledRouter(BuildHookInterface[Any]):
    """Adds the compiled modules beside their sources, which tracebacks quote."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":  # a source that is changed would go on as it was
            return
        self._folder = tempfile.TemporaryDirectory()
        self.app.display_waiting(f"compiling {len(HOT)} modules of the router: about a minute")
        folder = Path(self._folder.name)
        try:
            compiled = compile_router(Path(self.root), folder)
        except CompileError as error:
            self.app.abort(f"the router was not compiled: {error}")
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["force_include"].update({str(folder / path): path for path in compiled})

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            self._folder.cleanup()


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: compile_router.py FOLDER", file=sys.stderr)
        return 2
    root, folder = Path(__file__).resolve().parent.parent, Path(sys.argv[1])
    if folder.exists() and not list(folder.glob("*__mypyc*.so")):
        print(f"compile_router: {folder} is there, and was not made by this", file=sys.stderr)
        return 2
    print(f"compiling {len(HOT)} modules of the router: about a minute", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            compiled = compile_router(root, Path(scratch))
        except CompileError as error:
            print(f"the router was not compiled: {error}", file=sys.stderr)
            return 1
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(root, folder, ignore=LEFT_OUT)
        for path in compiled:
            shutil.copy(Path(scratch) / path, folder / path)
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
