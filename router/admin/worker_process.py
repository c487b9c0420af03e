"""One process of a router: takes over what operators want, and tells what it sees."""

from __future__ import annotations

from fastapi import FastAPI

from router.admin.desired_state import DesiredState, Tunables
from router.common.signature import Seal
from router.common.watched_file import Watched
from router.conversations.signed_store import SignedStore
from router.fleet.registry import EngineRegistry
from router.fleet.views import FleetView, build_fleet_view
from router.proxy.gateway import Gateway
from router.settings import Settings
from router.telemetry import logs


class WorkerProcess:
    """`settings` are those that the application was built with."""

    def __init__(self, settings: Settings, app: FastAPI) -> None:
        self._settings = settings
        self._gateway: Gateway = app.state.gateway
        self._registry: EngineRegistry = app.state.registry
        self._store: SignedStore | None = app.state.sealed_store
        self._watched: dict[str, Watched] = app.state.watched
        self._tunables = Tunables.of(settings)
        self._keys: tuple[str, ...] | None = None
        self._reloads = 0

    def adopt(self, state: DesiredState) -> FleetView:
        """What it sees from then on. A second time it changes nothing."""
        self._tune(state.tunables)
        self._weigh(state)
        self._registry.set_overrides(state.overrides)
        if state.store_keys != self._keys:
            self._change_keys(state.store_keys)
        if state.reloads != self._reloads:
            self._reloads = state.reloads
            for file in self._watched.values():
                file.look_soon()
        return build_fleet_view(self._gateway.fleet, self._registry)

    def _tune(self, tunables: Tunables) -> None:
        if tunables == self._tunables:
            return
        settings = tunables.over(self._settings)
        self._gateway.tune(settings)
        logs.set_level(settings.log_level)
        self._tunables = tunables

    def _weigh(self, state: DesiredState) -> None:
        settings = state.tunables.over(self._settings)
        weights = {**settings.weights, **state.overrides.weights}
        if weights != self._gateway.fleet.group_weights:
            self._gateway.fleet.set_group_weights(weights)

    def _change_keys(self, keys: tuple[str, ...] | None) -> None:
        if keys and self._store is not None:
            self._store.reseal(Seal([key.encode() for key in keys]))
        self._keys = keys
