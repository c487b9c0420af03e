"""Push is built and stepped where the transfer mode is push, and nowhere else."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_ext.common.config import ConnectorConfig, TransferMode
from engine_ext.common.orders import Expect, LeaseCancel, LeaseGrant, StepMetadata
from engine_ext.common.types import EngineIdentity
from engine_ext.connector import build_worker
from engine_ext.push import component
from engine_ext.push.component import Push
from engine_ext.wire.listener import HandshakeServer
from engine_ext.wire.notifications import (
    AwaitPrompt,
    ExtensionMessage,
    Hello,
    PromptReady,
    PushDone,
    PushExtension,
    PushFailed,
    PushRegistered,
    Renew,
    Renewed,
    ReturnBlocks,
    Withdraw,
    encode_extension,
    encode_registration,
)
from engine_ext.worker.agent import TransferState
from engine_ext.worker.context import WorkerContext
from engine_ext.worker.loop import TransferLoop
from engine_ext.worker.push_component import NO_PUSH
from tests.unit.engine_ext.scheduler.fakes import FakeAgent, push_registration, regions, source
from tests.unit.engine_ext.worker.test_worker import (
    GEOMETRY,
    Harness,
    listening,
    pull,
    remote_metadata,
)

PUSH_FOLDER = str(Path(component.__file__).parent)


@pytest.fixture
def prefiller() -> Iterator[HandshakeServer]:
    yield from listening(remote_metadata())


@pytest.fixture
def puller() -> Iterator[Harness]:
    harness = Harness(config=config("pull"))
    yield harness
    harness.loop.close()


def config(mode: TransferMode) -> ConnectorConfig:
    return ConnectorConfig(engine_id="engine-d", transfer_mode=mode)


def registration(generation: int | None) -> PushRegistered:
    extension = None
    if generation is not None:
        extension = PushExtension(generation, 0, 32, b"digest", "p-1", 1000.0, 0)
    return push_registration(disagg=extension)


def calls_of_push(run: Callable[[], object]) -> set[str]:
    """Functions of engine_ext/push that `run` calls."""
    called: set[str] = set()

    def record(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PUSH_FOLDER):
            called.add(frame.f_code.co_qualname)

    sys.setprofile(record)
    try:
        run()
    finally:
        sys.setprofile(None)
    return called


def life_of_an_engine(mode: TransferMode, port: int) -> None:
    """A lease that is renewed and expires, a cancelled request, a READ, and idle steps."""
    harness = Harness(config=config(mode))
    harness.apply(StepMetadata((Expect("p-1"), Expect("p-2"), LeaseCancel("p-2"))))
    harness.apply(StepMetadata((LeaseGrant("p-1", 30),)))
    harness.hears(Hello(b"agent-d"), sender="agent-d")
    harness.hears(Renew(1, ("p-1", "other")), sender="agent-d")
    harness.reading(source(port=port)).state = TransferState.DONE
    for _ in range(10):
        harness.step(seconds=10)
    assert harness.loop.num_open == 0
    harness.loop.revoke_all(harness.now)
    harness.loop.close()


def test_no_push_code_runs_in_the_loop_of_a_pull_engine(prefiller: HandshakeServer) -> None:
    assert calls_of_push(lambda: life_of_an_engine("pull", prefiller.port)) == set()
    pushing = calls_of_push(lambda: life_of_an_engine("push", prefiller.port))
    assert {"PushMatcher.step", "Registrations.step", "OutgoingInquiries.step"} <= pushing


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_the_worker_of_a_pull_engine_does_not_build_push(
    mode: TransferMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    for name in ("PushMatcher", "Registrations", "OutgoingInquiries", "RemoteClocks"):
        monkeypatch.setattr(component, name, noting(built, getattr(component, name)))
    identity = EngineIdentity("engine-d", "127.0.0.1", 1)
    worker = build_worker(config(mode), GEOMETRY, identity, lambda *_: FakeAgent())
    worker.register_kv_caches(regions())
    worker.shutdown()
    assert bool(built) == (mode == "push")


def noting(built: list[str], kind: Callable[..., object]) -> Callable[..., object]:
    def build(*arguments: Any, **keywords: Any) -> object:
        built.append(str(kind))
        return kind(*arguments, **keywords)

    return build


@pytest.mark.parametrize(("mode", "open_push"), [("pull", Push), ("push", None)])
def test_a_push_component_that_does_not_go_with_the_mode_is_refused(
    mode: TransferMode, open_push: type[Push] | None
) -> None:
    context = WorkerContext(
        agent=FakeAgent(),
        config=config(mode),
        geometry=GEOMETRY,
        identity=EngineIdentity("engine-d", "127.0.0.1", 1),
        regions=regions(),
        clock=lambda: 0.0,
    )
    with pytest.raises(ValueError, match=f"transfer mode {mode}"):
        TransferLoop(context, open_push=open_push)


def refused(generation: int) -> PushFailed:
    return PushFailed("d-1", generation, NO_PUSH)


@pytest.mark.parametrize(
    ("message", "answers"),
    [
        (registration(7), [refused(7)]),
        (registration(None), []),
        (Withdraw("d-1", 7, "p-1"), [refused(7)]),
        (Withdraw("d-1", 0, "p-1"), []),
        (ReturnBlocks("d-1", 7), [refused(7)]),
        (AwaitPrompt("d-1", b"digest", "p-1"), [PromptReady("d-1")]),
        (PushDone("d-1", 7), []),
        (PushFailed("d-1", 7, "reason"), []),
        (PromptReady("d-1"), []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_engine_in_pull_mode_refuses_pushes_at_once(
    puller: Harness, message: PushRegistered | ExtensionMessage, answers: list[ExtensionMessage]
) -> None:
    puller.hears(Hello(b"agent-d"), sender="agent-d")
    puller.sent()
    is_registration = isinstance(message, PushRegistered)
    encode: Callable[[Any], bytes] = encode_registration if is_registration else encode_extension
    puller.agent.sender = "agent-d"
    puller.agent.inbox.append(encode(message))
    puller.step()
    assert puller.sent() == answers
    assert puller.loop.num_open == 0
    assert puller.stats.pushes_failed == is_registration
    assert puller.stats.notifications_unknown == 0


def test_an_engine_in_pull_mode_takes_the_clocks_and_leases_of_push_peers(
    puller: Harness, prefiller: HandshakeServer
) -> None:
    """A heartbeat's answer tells the peer's clock, which only push needs; a peer in push mode may
    call a request by a name that this engine does not know."""
    puller.hears(Renewed(1, 20.0, (), {}, 5.0), sender="agent-p")
    puller.hears(Hello(b"agent-d"), sender="agent-d")
    puller.sent()
    puller.hears(Renew(3, ("their-name",)), sender="agent-d")
    (answer,) = puller.sent()
    assert isinstance(answer, Renewed)
    assert answer.gone == ("their-name",)
    assert puller.reading(source(port=prefiller.port)).state is TransferState.RUNNING
    assert pull(source()).request_id == "d-1"
