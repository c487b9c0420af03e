"""Idle rest: an engine does not step while all that it waits for is reported by a wake-up.

vLLM's loop takes a step every millisecond while its scheduler has requests: also if these are only
finished requests whose blocks a remote engine still reads, or requests whose KV is on its way. The
engine and its workers are then busy doing nothing. A worker's wake-up socket reports the end of a
transfer, so here `has_requests` and `has_finished_requests` are false until then, and the loop
sleeps in `input_queue.get`. `patch_engine_loop` hands over the function that ends this sleep.

If vLLM's loop asks something else than these two methods, it steps as before. If it left or paused
when they are false, it would do so while a remote reads: so we do not rest while the engine leaves
(`disagg_is_leaving`) or is paused. If workers are where a wake-up cannot come from (Ray, several
nodes), or another connector needs steps, the engine steps 50 times a second instead.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from engine_ext.vllm.compat.patching import Host
from engine_ext.vllm.connector_calls import find_our_connector

REST_SECONDS = 0.02
"""Longest pause between two steps that can only free blocks, where the engine must not sleep."""
METRICS_SECONDS = 0.1
METRICS_LOOKS = 20
"""Steps continue for this time, and for so many calls of `has_requests`, when there is nothing else
to do, so that /metrics counts the transfers that workers have started. On a stalling machine the
time alone would be over before the workers have begun."""


class IdleRestPart(Host):
    disagg_is_leaving = False
    """Set by patch_engine_loop."""
    woken: threading.Event

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._wake: Callable[[], None] | None = None
        self._can_sleep = False
        """Whatever is waited for wakes the engine."""
        self._awaits_kv_since = 0.0
        """Since when there is nothing else, or 0."""
        self._num_looks = 0
        """How often `has_requests` has found nothing else since then."""

    def set_wake(self, wake: Callable[[], None]) -> None:
        """`wake` ends the sleep of the engine's loop."""
        connector = find_our_connector(self.connector)
        if connector is not None and connector.listen_for_wakeups(self._on_wakeup):
            self._wake = wake
            is_alone = connector is self.connector and self.ec_connector is None
            parallel = self.vllm_config.parallel_config
            is_local = parallel.distributed_executor_backend in ("mp", "uni")
            # Wake-ups of workers arrive on their own machine only.
            self._can_sleep = is_alone and is_local and parallel.nnodes == 1

    def _on_wakeup(self, is_overdue: bool) -> None:
        self.woken.set()
        if self._wake is not None:
            self._wake()

    def has_requests(self) -> bool:
        if self.awaits_kv_alone():
            now = time.monotonic()
            self._awaits_kv_since = self._awaits_kv_since or now
            self._num_looks += 1
            is_over = now - self._awaits_kv_since > METRICS_SECONDS
            if is_over and self._num_looks > METRICS_LOOKS:
                return self.woken.is_set()
        else:
            self._awaits_kv_since, self._num_looks = 0.0, 0
        return bool(super().has_requests())

    def awaits_kv_alone(self) -> bool:
        if self.running or not self._can_sleep:
            return False
        if self._is_waited_for() or self.finished_req_ids or self.connector.has_pending_push_work():
            return False
        if self.finished_recving_kv_req_ids or self.failed_recving_kv_req_ids:
            return False
        waiting = (*self.waiting, *self.kv_holding_waiting)
        return bool(waiting) and all(map(self._awaits_wakeup, waiting))

    def _awaits_wakeup(self, request: Request) -> bool:
        is_parked = request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        return is_parked or self.connector.is_passed_over(request)

    def has_finished_requests(self) -> bool:
        has_finished = bool(super().has_finished_requests())
        has_others = self.finished_req_ids or self.running or self.waiting
        if not has_finished or has_others or self.kv_holding_waiting:
            return has_finished
        if self._can_sleep and not self._is_waited_for():
            return self.woken.is_set()
        self.woken.wait(REST_SECONDS)
        return True

    def _is_waited_for(self) -> bool:
        """vLLM leaves, pauses or sleeps once there are no requests, and what a remote may still
        read is one."""
        return self.disagg_is_leaving or self.pause_state is not PauseState.UNPAUSED
