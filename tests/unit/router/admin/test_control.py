"""What the control accepts, refuses, remembers and forgets; the processes are told, not real."""

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from router.admin import control as control_module
from router.admin.control import Control, ReloadResult, WorkerCounts
from router.admin.processes import RELOADABLE, DesiredState
from router.fleet.engine import EngineRole, EngineSpec, Intent
from router.fleet.registry import OperatorOverrides, apply_overrides
from router.fleet.views import EngineView, FleetView
from router.openai.errors import OperatorError
from router.settings import Address, Settings, SettingsError, load
from tests.unit.router.fleet.test_views import seen, view
from tests.unit.router.harness import eventually
from tests.unit.router.test_settings import ENGINES

A = EngineSpec(EngineRole.PREFILL, Address("a", 1))
B = EngineSpec(EngineRole.DECODE, Address("b", 1))
NEW = {"url": "http://n:1", "role": "decode"}
TOKEN = "0123456789abcdef"


class FakeProcesses:
    """`of` is what each process's one source lists; None: it does not answer."""

    def __init__(self, *of: list[EngineSpec] | None) -> None:
        self.of: list[list[EngineSpec] | None] = list(of)
        self.has_all_listings = True
        self.told: list[DesiredState] = []

    async def publish(self, state: DesiredState) -> Sequence[FleetView | None]:
        self.told.append(state)
        return [self._view(listed, state.overrides) for listed in self.of]

    def _view(
        self, listed: list[EngineSpec] | None, overrides: OperatorOverrides
    ) -> FleetView | None:
        if listed is None:
            return None
        engines, _ = apply_overrides([("file", listed)], overrides)
        by_file = {one.address for one in listed}
        return view(
            *[_seen(one, address in by_file, overrides) for address, one in engines.items()],
            informed=self.has_all_listings,
        )


def _seen(listed: EngineSpec, is_of_file: bool, overrides: OperatorOverrides) -> EngineView:
    name, sources = listed.name, ["file"] if is_of_file else []
    return seen(
        name=name,
        url=f"http://{name}",
        role=listed.role,
        intent=listed.intent,
        sources=[*(["admin"] if overrides.adds(listed.address) else []), *sources],
        drained=listed.intent is Intent.DRAINING,
    )


def control_of(
    *of: list[EngineSpec] | None, flags: dict[str, Any] | None = None
) -> tuple[Control, FakeProcesses, dict[str, Any]]:
    """And what settings are read from the next time."""
    given: dict[str, Any] = ENGINES | (flags or {})
    processes = FakeProcesses(*of)
    return Control(load(given), processes.publish, lambda: load(given)), processes, given


async def refused(awaitable: Any) -> tuple[int, str]:
    with pytest.raises(OperatorError) as error:
        await awaitable
    return error.value.status, str(error.value)


async def test_engines_are_added_and_taken_away() -> None:
    control, processes, _ = control_of([A, B], [A])
    added = await control.add(NEW | {"group": "blue", "weight": 2, "models": ["m"]})
    assert (added.name, added.sources, added.drained) == ("n:1", ["admin"], False)
    [spec] = control.state.overrides.added
    assert (spec.group, spec.weight, spec.models) == ("blue", 2.0, frozenset("m"))
    assert processes.told[-1] == control.state
    await control.remove("n:1")
    assert control.state.overrides == OperatorOverrides()


async def test_an_engine_may_come_draining_and_be_resumed() -> None:
    control, _, _ = control_of([A])
    assert (await control.add(NEW | {"draining": True})).intent is Intent.DRAINING
    assert (await control.resume("n:1")).intent is Intent.SERVING


@pytest.mark.parametrize(
    "entry",
    [
        None, [], 1, "x", {}, NEW | {"x": 1}, {"url": "http://n:1"}, NEW | {"url": "n:1"},
        NEW | {"url": "ftp://n:1"}, NEW | {"url": "http://n:1/v1"}, NEW | {"url": "http://u@n:1"},
        NEW | {"role": "x"}, NEW | {"weight": -1}, NEW | {"weight": 1e7}, NEW | {"weight": "1"},
        NEW | {"group": ""}, NEW | {"group": "a b"}, NEW | {"group": "a\n"},
        NEW | {"models": "m"}, NEW | {"models": [""]}, NEW | {"draining": "yes"},
    ],
)  # fmt: skip
async def test_what_the_file_would_not_take_is_refused(entry: object) -> None:
    control, _, _ = control_of([A])
    status, text = await refused(control.add(entry))
    assert status == 400
    assert "\n" not in text
    assert control.state.overrides == OperatorOverrides()


async def test_what_is_there_is_not_added_again() -> None:
    control, _, _ = control_of([A], [A])
    status, text = await refused(control.add({"url": "http://A:1", "role": "both"}))
    assert (status, text) == (409, "a:1 is listed by file already")
    await control.add(NEW)
    status, text = await refused(control.add(NEW))
    assert (status, text) == (409, "n:1 is listed by admin already")


async def test_only_what_was_added_here_is_taken_away() -> None:
    control, processes, _ = control_of([A], [A])
    assert await refused(control.remove("a:1")) == (
        409,
        "a:1 was not added by the admin API: it is listed by file",
    )
    assert (await refused(control.remove("z:1")))[0] == 404
    await control.add(NEW)
    await control.drain("n:1")
    processes.of[0] = [A, EngineSpec(EngineRole.DECODE, Address("n", 1))]
    await control.remove("n:1")
    assert Address("n", 1) in control.state.overrides.draining, "it is still there, and drains"


async def test_the_drain_of_what_is_taken_away_is_forgotten_at_once() -> None:
    control, _, _ = control_of([A])
    await control.add(NEW)
    await control.drain("n:1")
    await control.remove("n:1")
    assert (await control.add(NEW)).intent is Intent.SERVING


async def test_streams_of_a_drained_engine_move_until_the_drain_ends() -> None:
    control, _, _ = control_of([A, B])
    await control.drain("a:1", migrates=True)
    await control.drain("b:1")
    assert control.state.overrides.migrating == {Address("a", 1)}
    await control.drain("a:1")
    assert control.state.overrides.migrating == {Address("a", 1)}
    await control.resume("a:1")
    assert control.state.overrides.migrating == frozenset()
    assert control.state.overrides.draining == {Address("b", 1)}


@pytest.mark.parametrize("name", ["b:1", "B:1", "b:1/"])
async def test_an_engine_is_found_by_any_spelling(name: str) -> None:
    control, _, _ = control_of([A, B])
    assert (await control.drain(name)).name == "b:1"
    assert (await control.engine(name)).drained


@pytest.mark.parametrize("name", ["", "b", "b:2", "b:x", "b:1 ", "b:1#", "\ud800", "x" * 10_000])
async def test_nobody_has_that_name(name: str) -> None:
    control, _, _ = control_of([A, B])
    status, text = await refused(control.drain(name))
    assert status == 404
    assert len(text) < 400


async def test_without_a_process_nothing_is_promised() -> None:
    control, _, _ = control_of(None, None)
    for asked in (control.add(NEW), control.drain("a:1"), control.weigh("blue", 1.0)):
        assert (await refused(asked))[0] == 503
    assert control.state.overrides == OperatorOverrides()
    assert (await control.engines()).workers == WorkerCounts(answered=0, known=2)


async def test_a_drain_stays_until_nobody_lists_the_engine() -> None:
    control, processes, _ = control_of([A, B], [A, B])
    await control.drain("a:1")
    for of, has_all_listings in (
        ([[B], [A, B]], True),
        ([[B], None], True),
        ([None, None], True),
        ([[], []], False),
    ):
        processes.of, processes.has_all_listings = list(of), has_all_listings
        await control.forget_drains()
        assert control.state.overrides.draining == {Address("a", 1)}, (of, has_all_listings)
    processes.of, processes.has_all_listings = [[B], [B]], True
    await control.forget_drains()
    assert not control.state.overrides.draining
    processes.of = [[A, B], [A, B]]
    assert (await control.engine("a:1")).intent is Intent.SERVING, "another one, at its address"


async def test_there_is_an_end_to_what_can_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "MAX_ADDED_ENGINES", 2)
    monkeypatch.setattr(control_module, "MAX_GROUP_WEIGHTS", 0)
    control, _, _ = control_of([A])
    for port in (1, 2):
        await control.add(NEW | {"url": f"http://n:{port}"})
    assert (await refused(control.add(NEW | {"url": "http://n:3"})))[0] == 409
    assert (await refused(control.weigh("blue", 1.0)))[0] == 409


async def test_a_weight_that_was_not_given_cannot_be_taken_back() -> None:
    control, _, _ = control_of([A])
    assert (await refused(control.unweigh("blue")))[0] == 404


# Reload.


async def test_settings_are_read_again_and_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="disagg_router")
    control, processes, given = control_of([A])
    reloaded = await control.reload()
    assert (reloaded.applied, reloaded.needs_restart) == ([], [])
    given |= {"group_weights": "blue=9 green=1", "queue_size": 7, "log_level": "info"}
    given |= {"port": 1, "request_timeout": 5}
    reloaded = await control.reload()
    assert (reloaded.applied, reloaded.needs_restart) == (
        ["group_weights", "queue_size"],
        ["port", "request_timeout"],
    )
    assert processes.told[-1].tunables.queue_size == 7
    assert "settings that need a restart: --port --request-timeout" in caplog.text
    reloaded = await control.reload()
    assert (reloaded.applied, reloaded.needs_restart) == ([], ["port", "request_timeout"])


async def test_settings_that_cannot_be_used_change_nothing() -> None:
    control, processes, given = control_of([A])
    before = control.state
    given |= {"queue_size": 7, "port": "x"}
    with pytest.raises(SettingsError, match="--port"):
        await control.reload()
    assert control.state == before
    assert not processes.told


async def test_a_token_changes_and_cannot_be_taken_off_where_others_listen(tmp_path: Any) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    flags = {"admin_port": 0, "admin_host": "0.0.0.0", "admin_token_file": file}
    control, _, given = control_of([A], flags=flags)
    assert control.token == TOKEN
    file.write_text("another-token-that-is-long")
    assert (await control.reload()).applied == ["admin_token"]
    assert control.token == "another-token-that-is-long"
    for content in ("", "short", "two words that are long enough"):
        file.write_text(content)
        with pytest.raises(SettingsError, match="--admin-token-file"):
            await control.reload()
    # Right by itself; but the listener is where it is.
    given |= {"admin_host": "127.0.0.1"}
    del given["admin_token_file"]
    with pytest.raises(SettingsError, match=r"no admin token, .* listens on 0\.0\.0\.0"):
        await control.reload()
    assert control.token == "another-token-that-is-long"


async def test_store_keys_change_but_are_not_taken_off() -> None:
    flags = {"conversation_store": "redis://x", "conversation_store_key": "a" * 16}
    control, processes, given = control_of([A], flags=flags)
    given["conversation_store_key"] = "b" * 16 + "\n" + "a" * 16
    assert (await control.reload()).applied == ["conversation_store_key"]
    assert processes.told[-1].store_keys == ("b" * 16, "a" * 16)
    del given["conversation_store_key"]
    with pytest.raises(SettingsError, match="needs a restart"):
        await control.reload()
    assert control.state.store_keys == ("b" * 16, "a" * 16)


async def test_settings_that_hang_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "SETTINGS_READ_TIMEOUT_S", 0.05)
    go_on = threading.Event()

    def hang() -> Settings:
        assert go_on.wait(10)
        return load(ENGINES)

    control = Control(load(ENGINES), FakeProcesses([A]).publish, hang)
    try:
        with pytest.raises(SettingsError, match="within"):
            await control.reload()
        with pytest.raises(SettingsError, match="still being read"):
            await control.reload()
    finally:
        go_on.set()
    monkeypatch.undo()

    async def reloaded() -> ReloadResult:
        async with asyncio.timeout(10):
            while True:
                with contextlib.suppress(SettingsError):  # the first reading is about to end
                    return await control.reload()
                await asyncio.sleep(0.01)

    assert await reloaded() == ReloadResult(applied=[], needs_restart=[])


async def test_a_signal_logs_what_is_wrong_and_never_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    control, _, given = control_of([A])
    given["port"] = "x"
    control.reload_soon()
    await eventually(lambda: "settings are unchanged: --port" in caplog.text)

    def absurd() -> Settings:
        raise RecursionError("deep")

    Control(load(ENGINES), FakeProcesses([A]).publish, absurd).reload_soon()
    await eventually(lambda: "by an internal error" in caplog.text)


async def test_many_signals_are_not_many_reloads() -> None:
    control, processes, given = control_of([A])
    for size in range(100):
        given["queue_size"] = size
        control.reload_soon()
    await eventually(lambda: processes.told and processes.told[-1].tunables.queue_size == 99)
    assert len(processes.told) <= 2


def test_what_is_reloadable_is_a_setting() -> None:
    assert set(Settings.model_fields) >= RELOADABLE
