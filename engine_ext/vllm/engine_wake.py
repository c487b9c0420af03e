"""Lets our scheduler wake the engine's loop, which otherwise sleeps until a client asks something.

Plugins are loaded while the engine is being built, so it is the start of its loop that is wrapped.
"""

import functools
from typing import Any

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc

MARK = "_disagg_wake"


def install() -> None:
    """Idempotent."""
    for engine in (EngineCoreProc, DPEngineCoreProc):
        loop = vars(engine).get("run_busy_loop")
        if loop is not None and not hasattr(loop, MARK):
            engine.run_busy_loop = _handing_over(loop)


def _handing_over(original: Any) -> Any:
    @functools.wraps(original)
    def run_busy_loop(self: Any) -> Any:
        hand_over = getattr(self.scheduler, "set_wake", None)
        if hand_over is not None:
            hand_over(lambda: self.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None)))
        return original(self)

    setattr(run_busy_loop, MARK, True)
    return run_busy_loop
