"""Exit handlers of native libraries crash where two copies of a library are loaded. Here a handler
that aborts stands for such a pair."""

import ctypes
import subprocess
import sys

import pytest

from engine_ext.common.types import Region
from engine_ext.worker.agent import AgentError, NixlAgent

PROGRAM = """
import atexit, ctypes, sys
from engine_ext.worker.process_end import skip_library_exit_handlers

libc = ctypes.CDLL(None)
atexit.register(print, "Python's handlers have run")
skip_library_exit_handlers()
libc.on_exit(libc.abort, None)  # by a library that is loaded later
print("output", end=" ")
{end}
"""


@pytest.mark.parametrize(
    ("end", "status"), [("", 0), ("sys.exit(3)", 3), ("raise RuntimeError", 1)]
)
def test_a_process_keeps_its_status_whatever_exit_handlers_of_libraries_do(
    end: str, status: int
) -> None:
    command = [sys.executable, "-c", PROGRAM.format(end=end)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout) == (status, "output Python's handlers have run\n")


def test_an_engine_with_shared_memory_alone_names_the_variable_and_the_cure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "shm")
    memory = bytearray(4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    with pytest.raises(AgentError, match=r"UCX_TLS=shm .*unset it, or add tcp"):
        NixlAgent((Region("layer", address, 4096, 4096, 1),), ["UCX"], threads=0)
