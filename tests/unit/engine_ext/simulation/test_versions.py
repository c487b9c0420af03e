"""Engines with different versions of the extension, or that take each other for stock.

The simulation fails by itself where wrong KV is accepted.
"""

from typing import Any

import pytest

from engine_ext.common import prefix_hashes
from engine_ext.wire.errors import EXTENSION_VERSION
from tests.unit.engine_ext.simulation import engine as engines
from tests.unit.engine_ext.simulation.engine import SimRequest
from tests.unit.engine_ext.simulation.pair import tokens
from tests.unit.engine_ext.simulation.world import (
    NEWER,
    OLDER,
    OURS,
    SimEngine,
    Violation,
    Weather,
    World,
)

MIXED = [(OURS, NEWER), (NEWER, OURS), (OURS, OLDER), (OLDER, OURS), (OLDER, NEWER)]
SETTINGS: dict[str, Any] = {
    "bidirectional": True,
    "recompute_threshold": 4,
    "load_failure_policy": "recompute",
    "prefill_load_timeout": 10.0,
}


class Conversation:
    """P and D of two versions, and a turn that D keeps."""

    def __init__(self, prefiller: int | None, decoder: int | None) -> None:
        self.world = World()
        self.prefiller = self.world.engine("p", port=1, version=prefiller, **SETTINGS)
        self.decoder = self.world.engine("d", port=2, version=decoder, **SETTINGS)
        self.turn = self._first_turn()

    def _first_turn(self) -> dict[str, Any]:
        """Where D finds P's proof unreadable, or refuses P, it computes the prompt itself."""
        kept: list[dict[str, Any] | None] = []
        answer = self.prefiller.finish(self.prefiller.prefill("p-1", tokens(1)))
        assert answer is not None
        leg = SimRequest("d-1", tokens(1), {**answer, "retain": True}, then=kept.append)
        self.decoder.queue(leg)
        if not self.decoder.load(leg):
            assert self.decoder.begin(leg)
            del self.decoder.computing["d-1"]
            self.decoder.compute_locally(leg)
            self.decoder.run_request(leg)
        self.world.until(lambda: kept)
        assert kept[0] is not None
        self.said = leg.token_ids
        return kept[0]

    def read_while_it_is_revoked(self) -> SimRequest:
        """The READ of the turn begins, and lasts longer than D's grace; D refills the blocks."""
        self.world.network.weather = Weather(transfer=6.0)
        prompt = [*self.said, *range(7000, 7004)]
        request = SimRequest("p-2", prompt, {"do_remote_decode": True, **self.turn})
        self.prefiller.queue(request)
        if not self.prefiller.load(request):
            self.prefiller.finish(request)
        self.world.pass_time(0.2)
        self.decoder.scheduler.drain()
        self.decoder.wake()
        self.world.pass_time(30.0)
        return request

    def assert_settled(self) -> None:
        self.world.settle(60.0)
        for engine in (self.prefiller, self.decoder):
            engine.assert_empty()


@pytest.mark.parametrize(("prefiller", "decoder"), MIXED)
def test_a_turn_that_is_revoked_while_another_version_reads_it_is_never_accepted(
    prefiller: int, decoder: int
) -> None:
    conversation = Conversation(prefiller, decoder)
    conversation.read_while_it_is_revoked()
    assert not conversation.prefiller.outcomes.get("p-2", False)
    assert conversation.prefiller.stats.bytes_received == 0
    conversation.assert_settled()


def test_two_engines_of_one_version_find_out_that_the_turn_was_revoked() -> None:
    conversation = Conversation(OURS, OURS)
    conversation.read_while_it_is_revoked()
    assert conversation.prefiller.outcomes == {"p-2": False}
    conversation.assert_settled()


def test_proofs_that_an_older_engine_could_read_would_let_it_accept_wrong_kv(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Why a proof's version is raised with the extension's."""
    monkeypatch.setattr(engines, "OLDER_PROOF", prefix_hashes.VERSION)
    with pytest.raises(Violation, match="accepted wrong KV"):
        Conversation(OLDER, OURS).read_while_it_is_revoked()


def test_the_proofs_version_is_another_one_for_each_version_of_the_extension() -> None:
    """Raise both together."""
    assert (EXTENSION_VERSION, prefix_hashes.VERSION) == (3, 4)


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize(("prefiller", "decoder"), [(OURS, NEWER), (NEWER, OURS)])
def test_another_version_is_refused_by_name_and_told_that_it_need_not_wait(
    mode: str, prefiller: int, decoder: int, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    p = world.engine("p", mode, port=1, version=prefiller, lease_duration=1000.0)
    d = world.engine("d", mode, port=2, version=decoder)
    caplog.set_level("WARNING", "engine_ext")
    params = p.finish(p.prefill("cmpl-x1-0-0000000a", tokens(1)))
    d.decode("cmpl-x1-0-0000000d", tokens(1), params if mode == "pull" else pushed_by(p))
    world.until(lambda: d.outcomes, within=5.0)
    assert d.outcomes == {"cmpl-x1-0-0000000d": False}
    # Versions are relative to the one that this process has.
    theirs = OURS + prefiller - decoder
    said = f"engine p runs version {theirs} of this extension, this engine version {OURS}"
    assert said in caplog.text
    if mode == "pull":
        assert d.stats.pulls_refused == 1
        world.until(lambda: not p.held, within=2.0)
    assert p.stats.handshakes_ok == 0, "P was not dialled"


def pushed_by(prefiller: SimEngine) -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "remote_engine_id": prefiller.name,
        "remote_host": "sim",
        "remote_port": prefiller.identity.port,
        "remote_request_id": "cmpl-x1-0",
    }


def test_a_revocable_turn_is_not_read_from_an_engine_that_is_taken_for_stock() -> None:
    """As where one of the two has a secret and lets others in, and the other has none."""
    conversation = Conversation(OURS, OURS)
    assert conversation.turn["revocable"] is True
    conversation.world.network.listeners["sim", 2] = engines.handshake_payload(
        conversation.decoder.agent, "d", None
    )
    conversation.read_while_it_is_revoked()
    assert conversation.prefiller.outcomes == {"p-2": False}
    assert conversation.prefiller.stats.pulls_refused == 1
    conversation.assert_settled()
