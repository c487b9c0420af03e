"""A block goes back only on proof: what a peer said, or a time that it promised itself.

Each of these was wrong once. The world checks at every event that no block is given back while
something may touch it, and that nobody accepts wrong KV; a test's own assertion is what is left.
"""

from functools import partial
from typing import Any

import pytest

from engine_ext.common.orders import StepMetadata
from engine_ext.wire.notifications import (
    Gone,
    PushRegistered,
    Read,
    Renewed,
    Withdraw,
    decode_notification,
    encode_extension,
    encode_read_done,
    encode_registration,
)
from tests.unit.engine_ext.simulation.forger import Forger
from tests.unit.engine_ext.simulation.pair import LONGEST, Pair, connected, tokens
from tests.unit.engine_ext.simulation.stock import StockReader
from tests.unit.engine_ext.simulation.world import OURS, SimEngine, SimRequest, Weather


def leased(pair: Pair, number: int = 1) -> dict[str, Any]:
    """What P answers."""
    leg = pair.prefiller.prefill(f"cmpl-x{number}-0-0000000a", tokens(number))
    params = pair.prefiller.finish(leg)
    assert params is not None
    return params


def trusting(pair: Pair, params: dict[str, Any], decoder: SimEngine | None = None) -> SimRequest:
    """A request that waits in D's queue, and whose heartbeats were answered."""
    decoder = decoder or pair.decoder
    request = SimRequest(f"cmpl-x1-0-{decoder.name}", tokens(1), params)
    decoder.scheduler.on_new_request(request)
    pair.world.pass_time(0.5)
    assert decoder.horizon(request.request_id) > decoder.shown()
    return request


# A lease that ends early.


@pytest.mark.parametrize("reads", ["before the lease is revoked", "after it"])
def test_a_lease_revoked_early_keeps_its_blocks_until_the_horizon_of_its_reader_has_passed(
    reads: str,
) -> None:
    pair = Pair("pull")
    network = pair.world.network
    request = trusting(pair, leased(pair))
    network.weather = Weather(transfer=3.0)
    if reads == "before the lease is revoked":
        assert pair.decoder.load(request)
        pair.world.pass_time(0.5)
    network.weather = Weather(transfer=3.0, lose=1.0)
    assert pair.prefiller.scheduler.release("p", "cmpl-x1-0-0000000a")
    pair.world.pass_time(1.0)
    if reads == "after it":
        assert pair.decoder.load(request)
    pair.world.pass_time(5.0)
    network.weather = Weather()
    assert pair.decoder.outcomes[request.request_id]
    pair.assert_all_ended()


def test_a_reader_that_hears_of_the_revocation_gives_the_blocks_back_before_its_horizon() -> None:
    pair = Pair("pull")
    request = trusting(pair, leased(pair))
    assert pair.prefiller.scheduler.release("p", "cmpl-x1-0-0000000a")
    pair.world.pass_time(3.0)
    assert pair.prefiller.stats.leases_active == 0
    pair.decoder.abort(request)
    pair.assert_all_ended()


# One reader's end is not the other's.


def test_a_stock_read_done_ends_only_that_readers_share() -> None:
    pair = Pair("pull")
    network = pair.world.network
    params = leased(pair)
    request = trusting(pair, params)
    network.weather = Weather(transfer=3.0)
    assert pair.decoder.load(request)
    pair.world.pass_time(0.5)
    network.weather = Weather()
    stock = StockReader(network, "stock", 9)
    read = stock.pull(pair.prefiller.agent.name, params, tokens(1))
    pair.world.pass_time(5.0)
    assert read.was_right
    assert pair.decoder.outcomes[request.request_id]
    pair.assert_all_ended()


def test_a_stock_reader_that_heartbeats_keeps_the_lease_when_another_has_read() -> None:
    pair = Pair("pull")
    network = pair.world.network
    params = leased(pair)
    request = trusting(pair, params)
    stock = StockReader(network, "stock", 9)
    read = stock.pull(pair.prefiller.agent.name, params, tokens(1), queued=6.0)
    pair.world.pass_time(1.0)
    assert pair.decoder.load(request)
    pair.world.pass_time(10.0)
    assert pair.decoder.outcomes[request.request_id]
    assert read.was_right
    pair.assert_all_ended()


@pytest.mark.parametrize("end", ["declined here", "withdrawn", "written"])
def test_what_ends_a_request_by_other_ways_spares_a_reader_with_a_horizon(end: str) -> None:
    """Both legs on one engine; a push that is not wanted; a push that is."""
    pair = Pair("push")
    world = pair.world
    reader = world.engine("r", "pull", port=3)
    params = leased(pair)
    request = trusting(pair, params, reader)
    world.network.weather = Weather(transfer=3.0)
    assert reader.load(request)
    world.pass_time(0.5)
    world.network.weather = Weather()
    if end == "declined here":
        twin = SimRequest("cmpl-x1-0-0000000b", tokens(1), {**params, "do_remote_decode": True})
        twin.kv_transfer_params["do_remote_prefill"] = False
        pair.prefiller.scheduler.on_new_request(twin)
        pair.prefiller.abort(twin)
    elif end == "withdrawn":
        unwanted = SimRequest("cmpl-x1-0-0000000d", tokens(1), pair.where("x1"))
        pair.decoder.scheduler.on_new_request(unwanted)
        pair.decoder.abort(unwanted)
    else:
        assert pair.decoder.decode("cmpl-x1-0-0000000d", tokens(1), pair.where("x1"))
    world.pass_time(10.0)
    assert reader.outcomes[request.request_id]
    pair.assert_all_ended()


def test_a_holder_whose_host_has_two_names_is_one_holder() -> None:
    """One router knows it by its address, another by its name: our READs are one reader's."""
    pair = Pair("pull")
    listeners = pair.world.network.listeners
    listeners["sim-too", 1] = listeners["sim", 1]
    params = leased(pair)
    late = trusting(pair, {**params, "remote_host": "sim-too"})
    assert pair.decoder.decode("cmpl-x1-0-first", tokens(1), params)
    pair.world.pass_time(3.0)
    assert pair.decoder.outcomes["cmpl-x1-0-first"]
    assert pair.prefiller.stats.leases_active == 0
    pair.decoder.load(late)
    pair.assert_all_ended()


@pytest.mark.parametrize("moment", ["in the queue", "while it loads"])
def test_of_two_requests_of_one_engine_for_one_lease_the_one_that_leaves_spares_the_other(
    moment: str,
) -> None:
    """A router that sends a leg twice. Both have the same agent, and P hears one reader."""
    pair = Pair("pull")
    params = leased(pair)
    staying = trusting(pair, params)
    leaving = SimRequest("cmpl-x1-0-0000000e", tokens(1), params)
    pair.decoder.queue(leaving)
    pair.world.pass_time(1.0)
    pair.world.network.weather = Weather(transfer=3.0)
    if moment == "while it loads":
        assert pair.decoder.load(staying)
        pair.world.pass_time(0.5)
    pair.decoder.abort(leaving)
    pair.world.pass_time(1.0)
    if moment == "in the queue":
        assert pair.decoder.load(staying)
    pair.world.pass_time(10.0)
    assert pair.decoder.outcomes[staying.request_id]
    pair.assert_all_ended()


# A transfer that is let go.


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("emulated", [False, True])
def test_blocks_of_a_read_that_was_let_go_are_not_used_before_it_has_landed(
    policy: str, emulated: bool
) -> None:
    pair = Pair("pull", load_failure_policy=policy, transfer_timeout=5.0)
    pair.world.network.weather = Weather(transfer=40.0, emulated=emulated)
    pair.ask()
    pair.world.pass_time(10.0)
    if emulated:
        pair.prefiller.freeze(60.0)
    pair.assert_all_ended()


def test_blocks_of_a_read_that_never_ends_are_never_free_and_the_engine_goes_on() -> None:
    pair = Pair("pull", transfer_timeout=200.0)
    pair.world.network.weather = Weather(never=1.0, transfer=1.0)
    other = pair.world.engine("p2", port=3)
    pair.ask()
    pair.world.pass_time(1.0)
    pair.world.network.weather = Weather()
    pair.prefiller = other
    pair.world.pass_time(100.0)
    assert pair.is_served()


def test_blocks_of_a_write_that_was_let_go_are_not_used_before_it_has_landed() -> None:
    pair = Pair("push", transfer_timeout=5.0)
    pair.world.network.writes_are_bounded = False
    pair.world.network.weather = Weather(transfer=20.0)
    pair.ask()
    pair.world.pass_time(30.0)
    pair.world.network.weather = Weather()
    pair.assert_all_ended()


def test_a_load_refused_for_quarantine_tells_its_holder() -> None:
    pair = connected("pull", transfer_timeout=5.0)
    pair.world.network.weather = Weather(transfer=100.0)
    pair.ask()
    pair.world.pass_time(8.0)
    pair.world.network.weather = Weather()
    asked = pair.ask()
    pair.world.until(lambda: asked in pair.decoder.outcomes)
    pair.world.pass_time(3.0)
    assert not pair.decoder.outcomes[asked]
    assert not [name for name in pair.prefiller.held if name.startswith("cmpl-x3-")]
    pair.assert_all_ended()


# A WRITE that nobody hears of.


@pytest.mark.parametrize("decoder", ["as P", "in a hurry"])
def test_blocks_that_a_prefiller_cut_off_may_write_are_not_given_back(decoder: str) -> None:
    """P's WRITE may take two minutes; what D would allow its own does not matter."""
    pair = Pair("push", transfer_timeout=120.0)
    if decoder == "in a hurry":
        pair.decoder = pair.world.engine(
            "d2",
            "push",
            port=4,
            transfer_timeout=2.0,
            handshake_timeout=1.0,
            write_bound=3.0,
            landing_seconds=1.0,
            registration_timeout=5.0,
            lease_duration=6.0,
        )
    network = pair.world.network
    assert pair.is_served()
    network.weather = Weather(transfer=40.0)
    pair.ask()
    pair.world.until(lambda: network.num_writes == 2)
    network.weather = Weather(lose=1.0)
    pair.world.pass_time(60.0)
    network.weather = Weather()
    pair.assert_all_ended()


def test_blocks_that_a_dead_prefiller_was_writing_come_back_after_the_bound_it_announced() -> None:
    pair = Pair("push", transfer_timeout=20.0)
    network = pair.world.network
    assert pair.is_served()
    network.weather = Weather(transfer=10.0)
    asked = pair.ask()
    pair.world.until(lambda: network.num_writes == 2)
    pair.prefiller.die()
    pair.world.until(lambda: asked in pair.decoder.outcomes, 100)
    assert not pair.decoder.outcomes[asked]
    pair.world.pass_time(LONGEST)
    pair.decoder.assert_empty()


def test_a_twin_at_the_same_address_does_not_speak_for_a_prefiller_that_is_cut_off() -> None:
    """Its replacement has its id, as a pod that another node runs by now."""
    pair = Pair("push", transfer_timeout=120.0)
    network = pair.world.network
    assert pair.is_served()
    network.weather = Weather(transfer=4.0, emulated=True)
    asked = pair.ask()
    pair.world.until(lambda: network.num_writes == 2)
    pair.world.pass_time(0.5)
    cut_off = pair.prefiller
    cut_off.freeze(60.0)
    network.weather = Weather(emulated=True)
    pair.prefiller = pair.world.engine("p", "push", port=1)
    pair.world.until(lambda: asked in pair.decoder.outcomes, within=20.0)
    assert not pair.decoder.outcomes[asked]
    assert pair.is_served()
    assert pair.decoder.stats.quarantined_blocks_active == 3
    pair.world.pass_time(60.0)
    assert cut_off.stats.pushes_ok == 2
    pair.world.pass_time(10.0)
    assert pair.decoder.stats.quarantined_blocks_active == 0
    pair.assert_all_ended()
    cut_off.assert_empty()


def test_a_prefiller_back_under_its_own_id_is_used_while_what_it_left_waits_for_its_bound() -> None:
    pair = Pair("push", write_bound=130.0)
    network = pair.world.network
    assert pair.is_served()
    network.weather = Weather(transfer=10.0)
    asked = pair.ask()
    pair.world.until(lambda: network.num_writes == 2)
    pair.prefiller.die()
    network.weather = Weather()
    pair.prefiller = pair.world.engine("p", "push", port=1)
    pair.world.until(lambda: asked in pair.decoder.outcomes, within=20.0)
    assert not pair.decoder.outcomes[asked]
    assert pair.is_served()
    pair.world.pass_time(100.0)
    assert pair.decoder.stats.quarantined_blocks_active == 3
    pair.assert_all_ended()


# Whose word counts, and for how long.


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("version", [None, OURS - 1])
def test_blocks_are_never_registered_with_a_prefiller_that_promises_nothing(
    version: int | None, policy: str
) -> None:
    """Stock, or of an earlier version: if it died, nobody could say when they are free."""
    pair = Pair("push", load_failure_policy=policy)
    pair.prefiller = pair.world.engine("p", "push", port=1, version=version)
    assert not pair.is_served(within=10.0)
    pair.assert_all_ended()


def test_nothing_is_registered_while_too_much_is_in_quarantine() -> None:
    pair = connected("push", quarantine_share=0.1, registration_timeout=10.0)
    pair.decoder.decode("cmpl-y1-0-0000000d", tokens(8), pair.where("y1"))
    pair.world.pass_time(0.5)
    pair.prefiller.freeze(60.0)
    pair.world.until(lambda: "cmpl-y1-0-0000000d" in pair.decoder.outcomes, within=20.0)
    assert pair.decoder.stats.quarantined_blocks_active == 3
    pair.decoder.decode("cmpl-y2-0-0000000d", tokens(9), pair.where("y2"))
    pair.world.until(lambda: "cmpl-y2-0-0000000d" in pair.decoder.outcomes, within=1.0)
    assert pair.decoder.stats.quarantined_blocks_active == 3
    pair.assert_all_ended()


def test_a_lease_that_is_not_renewed_is_never_confirmed_beyond_its_end() -> None:
    """A turn, kept for so long and no longer, read as if it were a prompt."""
    pair = Pair("pull", bidirectional=True, retain_seconds=12.0)
    network = pair.world.network
    reader = pair.world.engine("r", port=3)
    params = leased(pair)
    turn: list[dict[str, Any]] = []
    leg = pair.decoder.decode("cmpl-x1-0-0000000d", tokens(1), {**params, "retain": True})
    assert leg is not None
    leg.then = lambda answer: turn.append(answer or {})
    pair.world.until(lambda: turn)
    pair.world.pass_time(8.0)
    kept = {**turn[0], "do_remote_prefill": True, "do_remote_decode": False}
    request = SimRequest("cmpl-x2-0-0000000e", leg.token_ids, kept)
    reader.scheduler.on_new_request(request)
    pair.world.pass_time(0.5)
    network.weather = Weather(transfer=6.0, lose=1.0)
    assert reader.load(request)
    pair.world.pass_time(10.0)
    network.weather = Weather()
    pair.world.pass_time(30.0)
    assert not reader.outcomes[request.request_id]
    pair.assert_all_ended()


def test_a_strangers_answer_to_a_heartbeat_proves_nothing() -> None:
    pair = Pair("pull")
    network = pair.world.network
    mallory = Forger(network)
    request = trusting(pair, leased(pair))
    network.weather = Weather(lose=1.0, transfer=4.0)
    pair.world.pass_time(28.0)
    assert pair.decoder.load(request)
    for sequence in range(30):
        network.deliver(
            mallory.agent.name, pair.decoder.agent.name, encode_extension(Renewed(sequence, 20.0))
        )
    pair.world.pass_time(10.0)
    assert not pair.decoder.outcomes[request.request_id]
    network.weather = Weather()
    pair.assert_all_ended()


@pytest.mark.parametrize("speaker", ["a stranger", "another holder"])
def test_only_its_holder_can_say_that_a_lease_is_gone(speaker: str) -> None:
    pair = Pair("pull")
    other = pair.world.engine("p2", port=3)
    mallory = Forger(pair.world.network)
    request = trusting(pair, leased(pair))
    name = mallory.agent.name if speaker == "a stranger" else other.agent.name
    message = encode_extension(Gone(("cmpl-x1-0-0000000a",)))
    pair.world.network.deliver(name, pair.decoder.agent.name, message)
    pair.world.pass_time(1.0)
    assert pair.decoder.load(request)
    pair.world.pass_time(1.0)
    assert pair.decoder.outcomes[request.request_id]


CONFIRMATIONS = {
    "a read": encode_extension(Read("cmpl-x1-0-0000000a")),
    "a stock read": encode_read_done("cmpl-x1-0-0000000a"),
    "a withdrawal": encode_extension(Withdraw("cmpl-x1-0-0000000d", 0, "cmpl-x1-0-0000000a")),
}


@pytest.mark.parametrize("message", CONFIRMATIONS)
def test_a_strangers_confirmation_frees_nothing_that_another_may_read(message: str) -> None:
    pair = Pair("pull")
    network = pair.world.network
    mallory = Forger(network)
    request = trusting(pair, leased(pair))
    network.weather = Weather(transfer=3.0)
    assert pair.decoder.load(request)
    pair.world.pass_time(0.5)
    network.deliver(mallory.agent.name, pair.prefiller.agent.name, CONFIRMATIONS[message])
    pair.world.pass_time(5.0)
    assert pair.decoder.outcomes[request.request_id]
    network.weather = Weather()
    pair.assert_all_ended()


@pytest.mark.parametrize("dialect", ["ours", "stock"])
def test_a_registration_counts_only_from_the_engine_whose_blocks_it_names(dialect: str) -> None:
    pair = Pair("push")
    network = pair.world.network
    mallory = Forger(network)
    assert pair.is_served()
    pair.decoder.decode("cmpl-x9-0-0000000d", tokens(9), pair.where("x9"))
    pair.world.pass_time(0.5)
    real = next(
        message
        for _, _, encoded in network.heard
        if isinstance(message := decode_notification(encoded), PushRegistered)
        and message.request_id == "cmpl-x9-0-0000000d"
    )
    forged = PushRegistered(
        **{
            **{name: getattr(real, name) for name in real.__struct_fields__},
            "local_block_ids": ((0, 1, 2),),
            "request_id": "cmpl-x9-0-0000000e",
            "disagg": real.disagg if dialect == "ours" else None,
        }
    )
    network.deliver(mallory.agent.name, pair.prefiller.agent.name, encode_registration(forged))
    pair.world.pass_time(0.5)
    pair.prefiller.finish(pair.prefiller.prefill("cmpl-x9-0-0000000a", tokens(9)))
    pair.world.pass_time(5.0)
    assert pair.decoder.outcomes["cmpl-x9-0-0000000d"]


def test_a_holder_with_a_short_lease_is_beaten_for_often_enough() -> None:
    """P's lease is 6 s, D's own 30 s."""
    pair = Pair("pull", lease_duration=6.0)
    patient = pair.world.engine("d2", port=3, lease_duration=30.0)
    params = leased(pair)
    request = SimRequest("cmpl-x1-0-0000000d", tokens(1), params)
    patient.scheduler.on_new_request(request)
    pair.world.pass_time(40.0)
    assert patient.load(request)
    pair.world.pass_time(2.0)
    assert patient.outcomes[request.request_id]


class LateWorker(SimEngine):
    """An engine whose worker half receives the orders of a step a second after the answers."""

    def step(self) -> None:
        if self.can_act and (meta := self.scheduler.build_connector_meta()):
            self.network.later(1.0, partial(self._apply, meta))
        super().step()

    def _apply(self, meta: StepMetadata) -> None:
        self.loop.apply(meta, self.clock())
        self.wake()


@pytest.mark.parametrize("word", ["a read", "a decline"])
def test_a_reader_of_a_turn_may_be_faster_than_the_grant(word: str) -> None:
    settings: dict[str, Any] = {"bidirectional": True, "recompute_threshold": 4}
    pair = Pair("pull", **settings)
    pair.decoder = pair.world.engine("d", port=2, make=LateWorker, retain_seconds=60.0, **settings)
    reader = pair.prefiller
    assert pair.is_served()

    def ask(turn: dict[str, Any] | None) -> None:
        assert turn is not None
        turn = {**turn, "do_remote_prefill": False, "do_remote_decode": True}
        again = reader.queue(SimRequest("cmpl-x3-0-0000000a", [*leg.token_ids, 7, 8], turn))
        assert word == "a decline" or reader.load(again)
        if word == "a decline":
            reader.abort(again)

    params = reader.finish(reader.prefill("cmpl-x2-0-0000000a", tokens(2)))
    leg = pair.decoder.queue(SimRequest("d-2", tokens(2), {**(params or {}), "retain": True}))
    leg.then = ask
    assert pair.decoder.load(leg)
    pair.world.pass_time(6.0)
    assert leg.is_over
    assert reader.outcomes.get("cmpl-x3-0-0000000a", False) == (word == "a read")
    assert "d-2" not in pair.decoder.held, "it is not kept for its minute"
    pair.assert_all_ended()
