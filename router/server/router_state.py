"""The objects that endpoints, the server and the admin API share, on `app.state.router`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fastapi import FastAPI

from router.common.deadlines import Deadlines
from router.common.tls import TlsContext
from router.common.watched_file import WatchedFiles
from router.conversations.store import SignedStore
from router.conversations.stored_responses import ResponseStore
from router.fleet.probes import Prober
from router.fleet.registry import EngineRegistry
from router.proxy.gateway import Gateway
from router.ui.hub import DashboardHub


@dataclass(slots=True)
class RouterState:
    """Built by `router.server.app.build`.

    `exposition` returns the metrics in Prometheus' text format. `watched_files` and `certificates`
    are by their name in the metrics. `failures` returns the present failures of Redis, by the use
    of Redis. `dashboard_port` is the only port that serves the dashboard, None if all do.
    """

    gateway: Gateway
    deadlines: Deadlines
    prober: Prober
    registry: EngineRegistry
    stored_responses: ResponseStore
    signed_store: SignedStore | None
    exposition: Callable[[], bytes]
    watched_files: dict[str, WatchedFiles]
    certificates: dict[str, TlsContext]
    failures: Callable[[], dict[str, str]]
    dashboard: DashboardHub | None = None
    dashboard_port: int | None = None


def state_of(app: FastAPI) -> RouterState:
    state: RouterState = app.state.router
    return state
