"""vLLM's engine loop, as far as our connector needs it: it can be woken, and it leaves or pauses
only when nobody reads from it any more.

Installed by the connector itself, in the engine's process, while the engine is being built: with
the plugin or without, under whichever scheduler class.
"""

import functools
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc, EngineShutdownState

from engine_ext.vllm.compat.wrapped import wrap
from engine_ext.vllm.connector import ours_in


def install() -> None:
    """Idempotent."""
    for engine in (EngineCoreProc, DPEngineCoreProc):
        wrap(engine, "run_busy_loop", _handing_over)
    wrap(EngineCoreProc, "_handle_shutdown", _draining)
    wrap(Scheduler, "set_pause_state", _keeping_no_turns)


def _handing_over(original: Any) -> Any:
    """Our scheduler class gets what ends the sleep of the loop."""

    @functools.wraps(original)
    def run_busy_loop(self: Any) -> Any:
        hand_over = getattr(self.scheduler, "set_wake", None)
        if hand_over is not None:
            hand_over(lambda: self.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None)))
        return original(self)

    return run_busy_loop


def _draining(original: Any) -> Any:
    """SIGTERM with `--shutdown-timeout`: vLLM's loop goes on while its scheduler has requests, and
    a leased one is a request. What nobody reads now is given up first; our scheduler class must
    not rest. Without a timeout vLLM aborts everything, and leaves."""

    @functools.wraps(original)
    def _handle_shutdown(self: Any) -> Any:
        if self.shutdown_state == EngineShutdownState.REQUESTED:
            ours = ours_in(self.scheduler.connector)
            if ours is not None:
                ours.drain()
            if self.vllm_config.shutdown_timeout:
                self.scheduler.disagg_is_leaving = True
        return original(self)

    return _handle_shutdown


def _keeping_no_turns(original: Any) -> Any:
    """Pause and sleep wait until the scheduler has no requests: a turn would be waited for as long
    as it is kept."""

    @functools.wraps(original)
    def set_pause_state(self: Any, pause_state: PauseState) -> None:
        ours = ours_in(self.connector)
        if ours is not None:
            (ours.resume if pause_state is PauseState.UNPAUSED else ours.drain)()
        original(self, pause_state)

    return set_pause_state
