"""A thread that plays scheduler and kubelet for the pods of a namespace, so that Deployments live.

Each pod gets an address and a process, is reported ready when that is, and ends as in life: told
by its deletion, it runs its preStop, gets SIGTERM, and is gone when its process is, or is killed at
the end of its grace period. While the API server is away, what runs goes on.
"""

import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event, Thread
from typing import Protocol, Self

import httpx

from tests.k8s.cluster import Manifest
from tests.k8s.pods import Pods

logger = logging.getLogger(__name__)

TICK = 0.1
_numbers = itertools.count(1)


class Process(Protocol):
    """What runs in a pod."""

    def is_ready(self) -> bool:
        """Answers soon."""

    def exit_status(self) -> int | None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    def close(self) -> None:
        """It must be gone after that."""


Run = Callable[[Manifest, str], Process]
"""Of a pod and its address."""


class Idle:
    """Does nothing, as well as can be."""

    _is_over = False

    def is_ready(self) -> bool:
        return True

    def exit_status(self) -> int | None:
        return 0 if self._is_over else None

    def terminate(self) -> None:
        self._is_over = True

    kill = close = terminate


def idle(pod: Manifest, ip: str) -> Process:
    return Idle()


@dataclass
class Tenant:
    """A pod on this node. `ends_at` and `killed_at`: when SIGTERM and SIGKILL are due. `is_ready`
    is what was reported last, None before anything was."""

    name: str
    ip: str
    process: Process
    pre_stop: float
    grace: float
    is_ready: bool | None = None
    ends_at: float | None = None
    killed_at: float | None = None
    is_gone: bool = False


class Kubelet:
    """At work during a `with` block. `faults` has a line for each process that did not end well."""

    def __init__(self, pods: Pods, run: Run, clock: Callable[[], float] = time.monotonic) -> None:
        self.faults: list[str] = []
        self.tenants: dict[str, Tenant] = {}
        self._pods = pods
        self._run = run
        self._clock = clock
        self._over = Event()
        self._thread = Thread(target=self._work, name="kubelet")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def evict(self, name: str) -> None:
        """Ends a pod although nobody has deleted it."""
        self.tenants[name].ends_at = self._clock()

    def _work(self) -> None:
        try:
            while not self._over.wait(TICK):
                try:
                    self._follow(self._pods.all())
                except httpx.HTTPError as error:  # the API server is away, or what was asked is
                    logger.info("%s", error)
                for tenant in [one for one in self.tenants.values() if not one.is_gone]:
                    self._advance(tenant)
        except Exception as error:
            logger.exception("the kubelet died")
            self.faults.append(f"the kubelet died: {error!r}")
        finally:
            for tenant in self.tenants.values():
                if not tenant.is_gone:
                    tenant.process.close()

    def _follow(self, pods: dict[str, Manifest]) -> None:
        """Raises httpx.HTTPError."""
        for name, tenant in self.tenants.items():
            if name not in pods and tenant.ends_at is None:
                tenant.ends_at = self._clock()
        for name, pod in pods.items():
            if "nodeName" not in pod["spec"]:
                self._pods.schedule(name)
            elif "deletionTimestamp" in pod["metadata"]:
                self._leave(name)
            elif name not in self.tenants:
                # Anew, for others read it meanwhile.
                self.tenants = {**self.tenants, name: self._move_in(name, pod)}

    def _leave(self, name: str) -> None:
        tenant = self.tenants.get(name)
        if tenant is None or tenant.is_gone:
            self._pods.end(name)
        elif tenant.ends_at is None:
            tenant.ends_at = self._clock() + tenant.pre_stop

    def _move_in(self, name: str, pod: Manifest) -> Tenant:
        number = next(_numbers)
        ip, grace = f"127.2.{number // 250}.{number % 250 + 1}", _grace(pod)
        return Tenant(name, ip, self._run(pod, ip), _pre_stop(pod), grace)

    def _advance(self, tenant: Tenant) -> None:
        process, status = tenant.process, tenant.process.exit_status()
        if status is not None:
            self._bury(tenant, status)
        elif tenant.ends_at is None:
            if not tenant.is_ready and (is_ready := process.is_ready()) is not tenant.is_ready:
                self._report(tenant, is_ready)
        elif tenant.killed_at is None and self._clock() >= tenant.ends_at:
            process.terminate()
            tenant.killed_at = self._clock() + tenant.grace - tenant.pre_stop
        elif tenant.killed_at is not None and self._clock() >= tenant.killed_at:
            self.faults.append(f"{tenant.name} was killed after {tenant.grace:g} s")
            process.kill()

    def _report(self, tenant: Tenant, is_ready: bool) -> None:
        try:
            self._pods.report(tenant.name, tenant.ip, ready=is_ready)
        except httpx.HTTPError as error:
            logger.info("%s", error)  # the next time
        else:
            tenant.is_ready = is_ready

    def _bury(self, tenant: Tenant, status: int) -> None:
        if tenant.killed_at is None or status != 0:
            self.faults.append(f"{tenant.name} ended with status {status}")
        tenant.process.close()
        tenant.is_gone = True


def _grace(pod: Manifest) -> float:
    return float(pod["spec"]["terminationGracePeriodSeconds"])


def _pre_stop(pod: Manifest) -> float:
    """The chart's are all `sleep`, in each container."""
    commands = [
        hooks["preStop"]["exec"]["command"]
        for one in pod["spec"]["containers"]
        if (hooks := one.get("lifecycle"))
    ]
    assert all(program == "sleep" for program, _ in commands)
    return max((float(seconds) for _, seconds in commands), default=0.0)
