"""Exceptions planted in the halves of a connector; for vLLM's environment and for the project's."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from engine_ext.scheduler.scheduler import SchedulerConnector
from engine_ext.worker.worker import WorkerConnector

RECOVERY = {"fail_load", "fail_finish", "fail_loads"}
"""Called when another has raised."""
TAKING = {"build_connector_meta", "get_transfer_results"}
"""Handing out what they took is the last thing they do: nothing can raise after it."""
OUTSIDE = {
    *("set_handshake_metadata", "register_kv_caches", "get_handshake_payload", "set_wake"),
    *("stats", "shutdown", "wait_for_save", "release", "revoke", "inspect"),
    *("on_step", "on_preempted", "wants_steps_of"),
    *("change_weights", "is_stale_load", "lend_from", "borrow_with", "revoke_loans"),
}
"""Not called by vLLM's steps, or in push mode alone."""
IDLE = {"has_pending_work", "is_passed_over", "load_failure_policy", "recover"}
"""Called where there are no requests, after a failed load, or after a lost report."""


class Fault(NamedTuple):
    hook: str
    """A method of one of the halves."""
    is_after: bool
    """It raises when it has done its work, instead of doing it."""

    @property
    def ends_load(self) -> bool:
        """A decode request that meets it has no KV to go on with, and ends by policy."""
        return self in (Fault("update_state_after_alloc", False), Fault("start_load_kv", False))

    def __str__(self) -> str:
        return f"{'after' if self.is_after else 'before'} {self.hook}"


class Planted:
    """A half whose method raises where `next_fault` says so. Everything else is the half's own."""

    def __init__(self, half: Any, next_fault: Callable[[str], Fault | None]) -> None:
        self._half = half
        self._next_fault = next_fault

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._half, name)
        return self._raising(name, value) if callable(value) else value

    def _raising(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            fault = self._next_fault(name)
            if fault is None:
                return method(*args, **kwargs)
            if fault.is_after:
                method(*args, **kwargs)
            raise RuntimeError(f"planted {fault}")

        return call


class Broken:
    """A half of which nothing works."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"planted: {name}")


def public(owner: type) -> list[str]:
    return [
        name
        for name, value in vars(owner).items()
        if name[0] != "_" and (inspect.isfunction(value) or isinstance(value, classmethod))
    ]


def faults() -> Iterator[Fault]:
    """Every method of both halves, so that a new one is not forgotten."""
    for half in (SchedulerConnector, WorkerConnector):
        for hook in public(half):
            if hook not in RECOVERY | OUTSIDE:
                yield Fault(hook, is_after=False)
                if hook not in TAKING:
                    yield Fault(hook, is_after=True)
