"""vLLM's engine loop: it can be woken, and it leaves or pauses as soon as no remote reads.

`EngineCoreProc.run_busy_loop` (and its data-parallel subclass) calls `_handle_shutdown` before each
step, then sleeps in `input_queue.get` while its scheduler has no requests. A leased request is a
request to vLLM, and so is a turn. We change two things:

* `_handle_shutdown`: at the first call, our scheduler class gets a function that ends the sleep (it
  puts a WAKEUP into the queue). When the engine is asked to leave (SIGTERM), turns are given
  up, because no reader may ever come for them; with `--shutdown-timeout` the loop goes on until
  readers have gone, so our scheduler class must not rest. Without a timeout vLLM aborts everything,
  and leaves.
* `Scheduler.set_pause_state`: pause and sleep wait until the scheduler has no requests, which a
  turn would delay for as long as it is kept. So turns are given up here, too.

If the loop stops calling `_handle_shutdown`, our scheduler class does not rest, and an engine that
leaves waits for its turns. If WAKEUP did something, it would be done at each wake-up.

The connector itself installs this, in the engine's process, while the engine is being built: with
the plugin or without, under whichever scheduler class.
"""

from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState

from engine_ext.vllm.compat import support
from engine_ext.vllm.compat.patching import wrap
from engine_ext.vllm.connector_calls import find_our_connector
from engine_ext.vllm.optional.engine_loop import EARLY_EXIT

HANDED_OVER = "_disagg_wake_is_handed_over"


def install() -> None:
    """Idempotent."""
    wrap(EngineCoreProc, "_handle_shutdown", _wrap_handle_shutdown)
    if support.is_on(EARLY_EXIT):
        wrap(Scheduler, "set_pause_state", _wrap_set_pause_state)


def _wrap_handle_shutdown(original: Any) -> Any:
    def _handle_shutdown(self: Any) -> Any:
        if not hasattr(self, HANDED_OVER):
            setattr(self, HANDED_OVER, True)
            _hand_over_wake(self)
        if self.shutdown_state == EngineShutdownState.REQUESTED:
            ours = find_our_connector(self.scheduler.connector)
            if ours is not None and support.is_on(EARLY_EXIT):
                ours.drain()
            if self.vllm_config.shutdown_timeout:
                self.scheduler.disagg_is_leaving = True
        return original(self)

    return _handle_shutdown


def _hand_over_wake(engine: Any) -> None:
    set_wake = getattr(engine.scheduler, "set_wake", None)
    if set_wake is not None:
        set_wake(lambda: engine.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None)))


def _wrap_set_pause_state(original: Any) -> Any:
    def set_pause_state(self: Any, pause_state: PauseState) -> None:
        ours = find_our_connector(self.connector)
        if ours is not None:
            (ours.resume if pause_state is PauseState.UNPAUSED else ours.drain)()
        original(self, pause_state)

    return set_pause_state
