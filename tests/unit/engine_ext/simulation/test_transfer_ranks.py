"""Engines of several ranks, one rank's loop stepped by hand: what one rank does, the others hear.

Fake agents, a fake clock, real handshakes. Rank r of the remote engine is "agent-<r>".
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from engine_ext.common.config import ConnectorConfig
from engine_ext.common.orders import (
    ConfirmReturn,
    Decline,
    Fence,
    LeaseCancel,
    LeaseGrant,
    PartialOffer,
    PullOrder,
    PushInquiry,
    PushOffer,
    PushRegistration,
    Reclaim,
    StepMetadata,
    TrackOrder,
)
from engine_ext.common.types import (
    EngineIdentity,
    PeerAddress,
    PushTarget,
    RemoteSource,
    TransferResults,
)
from engine_ext.push.registrations import RETURNED_SECONDS
from engine_ext.wire import errors, handshake
from engine_ext.wire import notifications as wire
from engine_ext.wire.listener import HandshakeServer
from engine_ext.worker.agent import TransferState
from engine_ext.worker.heartbeats import CLOCK_DRIFT
from engine_ext.worker.loop import LEASED_WAIT
from tests.unit.engine_ext.layout.cache_model import Model, RankCache
from tests.unit.engine_ext.scheduler.fakes import FakeTransfer, push_registration
from tests.unit.engine_ext.worker.stepped_loop import SteppedLoop

MODEL = Model(layers=1, heads=4, head_bytes=8)
OK = TransferResults(finished_recving=frozenset(["d-1"]))
FAILED = TransferResults(finished_recving=frozenset(["d-1"]), failed_recving=frozenset(["d-1"]))
SENT = TransferResults(finished_sending=frozenset(["p-1"]))
FREE = TransferResults(finished_sending=frozenset(["d-1"]))
WRITE_BOUND = 40.0


class Rank(SteppedLoop):
    """Rank 0 of an engine of `ours` ranks, facing an engine of `theirs`."""

    def __init__(
        self, ours: int, theirs: int, *, extension: int | None = errors.EXTENSION_VERSION
    ) -> None:
        config = ConnectorConfig(engine_id="us", transfer_mode="push")  # It READs, too.
        cache = RankCache(MODEL, size=ours)
        identity = EngineIdentity("us", "127.0.0.1", 1, ours)
        super().__init__(config, identity, cache.geometry(), cache.regions())
        self.server = HandshakeServer("127.0.0.1", 0, _payloads(theirs, extension))
        self.address = PeerAddress("remote", "127.0.0.1", self.server.port, theirs)

    def close(self) -> None:
        self.loop.close()
        self.server.close()

    def sent(self) -> list[tuple[str, wire.Notification]]:
        messages, self.agent.sent = self.agent.sent, []
        decoded = [(name, wire.decode_notification(message)) for name, message in messages]
        return [(name, one) for name, one in decoded if not isinstance(one, wire.Hello)]

    def hears(self, message: bytes | wire.ExtensionMessage, rank: int) -> None:
        told = message if isinstance(message, bytes) else wire.encode_extension(message)
        self.agent.sender = f"agent-{rank}"
        self.agent.inbox.append(told)
        self.step()

    def source(self) -> RemoteSource:
        return RemoteSource(self.address, "p-1", self.address.tp_size, ((1, 2),), 32)

    def reading(self) -> list[FakeTransfer]:
        self.apply(
            StepMetadata((PullOrder("d-1", self.source(), ((3, 4),), 0, 32, is_proven=True),))
        )
        self.step_until(lambda: self.agent.transfers)
        return self.agent.transfers


def _payloads(size: int, extension: int | None) -> dict[errors.Rank, bytes]:
    return {
        (0, rank): handshake.encode_payload(
            _metadata(rank, size, extension),
            {},
        )
        for rank in range(size)
    }


def _metadata(rank: int, size: int, extension: int | None) -> handshake.AgentMetadata:
    metadata = RankCache(MODEL, rank=rank, size=size).metadata()
    metadata.agent_metadata = f"agent-{rank}".encode()
    metadata.disagg_ext = extension
    metadata.lease_extension = 20.0
    metadata.write_bound = WRITE_BOUND
    metadata.returns_blocks = True
    return metadata


Launch = Callable[..., Rank]


@pytest.fixture
def launch() -> Iterator[Launch]:
    with ExitStack() as stack:

        def start(ours: int, theirs: int, **settings: int | None) -> Rank:
            rank = Rank(ours, theirs, **settings)
            stack.callback(rank.close)
            return rank

        yield start


@pytest.fixture
def rank(launch: Launch) -> Rank:
    """It faces an engine of two ranks."""
    return launch(1, 2)


def finish(rank: Rank, *states: TransferState) -> None:
    for transfer, state in zip(rank.agent.transfers, states, strict=True):
        transfer.state = state
    rank.step()


DONE, RUNNING, BROKEN = TransferState.DONE, TransferState.RUNNING, TransferState.FAILED


# Reading.


def test_a_stock_engine_of_two_ranks_is_read_in_two_parts_and_reported_once(
    launch: Launch,
) -> None:
    rank = launch(1, 2, extension=None)
    assert [t.notification for t in rank.reading()] == [b"p-1:1", b"p-1:1"]
    finish(rank, DONE, RUNNING)
    assert not rank.results.take()
    finish(rank, DONE, DONE)
    assert rank.results.take() == OK
    rank.step()
    assert not rank.results.take()
    assert rank.stats.pulls_ok == 1


def test_a_holder_hears_how_many_ranks_read_from_it(launch: Launch) -> None:
    assert [t.notification for t in launch(4, 2, extension=None).reading()] == [b"p-1:2"]


def test_one_failed_part_fails_the_load_once_the_other_has_ended(rank: Rank) -> None:
    rank.reading()
    rank.apply(StepMetadata())
    rank.sent()
    finish(rank, BROKEN, RUNNING)
    assert not rank.results.take()
    finish(rank, BROKEN, DONE)
    assert rank.results.take() == FAILED
    assert all(transfer.released for transfer in rank.agent.transfers)
    assert rank.sent() == [(f"agent-{i}", wire.Read("p-1")) for i in range(2)]
    assert rank.agent.peers == []


def test_a_part_that_does_not_end_keeps_the_blocks_of_a_load_that_has_failed(rank: Rank) -> None:
    rank.reading()
    finish(rank, DONE, RUNNING)
    rank.step(rank.config.transfer_timeout + 1)
    assert rank.results.take() == FAILED
    rank.apply(StepMetadata((Fence("d-1"),)))
    rank.step(1000)
    assert not rank.results.take()
    finish(rank, DONE, DONE)
    assert rank.results.take() == FREE


def sequences(rank: Rank) -> list[int]:
    reads = [wire.decode_notification(t.notification) for t in rank.agent.transfers]
    return [read.sequence for read in reads if isinstance(read, wire.Read)]


def test_every_holder_must_say_that_its_part_was_in_time(rank: Rank) -> None:
    rank.reading()
    finish(rank, DONE, DONE)
    first, second = sequences(rank)
    rank.hears(wire.ReadAck(first, valid=True), 0)
    rank.hears(wire.ReadAck(second, valid=True), 0)
    assert not rank.results.take()
    rank.hears(wire.ReadAck(second, valid=True), 1)
    assert rank.results.take() == OK


def test_one_holder_whose_lease_had_ended_fails_the_load(rank: Rank) -> None:
    rank.reading()
    finish(rank, DONE, DONE)
    rank.hears(wire.ReadAck(sequences(rank)[1], valid=False), 1)
    assert rank.results.take() == FAILED
    assert rank.stats.reads_unproven == 1


def test_one_ranks_answered_heartbeat_is_no_proof_for_the_other(rank: Rank) -> None:
    rank.apply(StepMetadata((TrackOrder("d-1", rank.address, "p-1"),)))
    rank.step_until(lambda: len(rank.agent.sent) == 4)
    beats = rank.sent()
    assert [name for name, _ in beats] == ["agent-0", "agent-1"]
    _, renew = beats[0]
    assert isinstance(renew, wire.Renew)
    rank.hears(wire.Renewed(renew.sequence, 20.0), 0)
    rank.reading()
    finish(rank, DONE, DONE)
    assert not rank.results.take()


def test_a_release_reaches_every_rank(rank: Rank) -> None:
    rank.apply(StepMetadata((Decline(rank.source()),)))
    rank.step_until(lambda: len(rank.agent.sent) == 4)
    assert rank.sent() == [(f"agent-{i}", wire.Read("p-1")) for i in range(2)]


def test_copies_of_a_head_are_read_once_and_all_of_them_let_go(launch: Launch) -> None:
    """4 heads on 8 ranks: ranks 0 to 7 of them hold heads 0 0 1 1 2 2 3 3."""
    rank = launch(1, 8, extension=None)
    rank.reading()
    assert len(rank.agent.transfers) == 4
    finish(rank, *[DONE] * 4)
    assert rank.results.take() == OK
    assert [name for name, _ in rank.sent()] == [f"agent-{i}" for i in (1, 3, 5, 7)]


def test_a_lease_of_two_readers_is_not_ended_by_one_that_says_it_twice(rank: Rank) -> None:
    rank.apply(StepMetadata((LeaseGrant("p-1", 30),)))
    for _ in range(2):
        rank.hears(b"p-1:2", 0)
    assert not rank.results.take()
    rank.hears(b"p-1:2", 1)
    assert rank.results.take() == SENT


def test_an_absurd_number_of_ranks_is_a_failed_load(launch: Launch) -> None:
    rank = launch(1, 1)
    source = replace(rank.source(), address=rank.address._replace(tp_size=1024))
    rank.apply(StepMetadata((PullOrder("d-1", source, ((3, 4),), 0, 32, is_proven=True),)))
    rank.step()
    assert rank.results.take() == FAILED


# Being written to.


CLOCK = 5000.0
"""Of P, when it answers our first heartbeat."""


def registered(rank: Rank, *, recomputes: bool = False) -> list[wire.PushRegistered]:
    target = PushTarget(rank.address, rank.address.tp_size, "p-1")
    order = PushRegistration("d-1", target, ((3, 4),), 0, 32, b"", recomputes)
    track = TrackOrder("d-1", rank.address, "p-1")
    rank.apply(StepMetadata((track, order)))
    number = max(1, rank.address.tp_size)
    rank.step_until(lambda: len(rank.agent.sent) == 2 * number)
    for index, (_, beat) in enumerate(m for m in rank.sent() if isinstance(m[1], wire.Renew)):
        assert isinstance(beat, wire.Renew)
        rank.hears(wire.Renewed(beat.sequence, 20.0, clock=CLOCK), index)
    return [message for _, message in rank.sent() if isinstance(message, wire.PushRegistered)]


def generation(messages: list[wire.PushRegistered]) -> int:
    assert len(messages) == 2
    assert messages[0] == messages[1]
    assert messages[0].disagg is not None
    return messages[0].disagg.generation


def test_a_rank_that_waits_for_p_takes_a_whole_step_only_at_a_message_or_every_25_ms(
    rank: Rank,
) -> None:
    number = generation(registered(rank))
    rank.step()

    def is_whole(step: Callable[[], object]) -> bool:
        rank.stats.pushes_active = -1  # A whole step counts anew.
        step()
        return rank.stats.pushes_active != -1

    steps = [is_whole(lambda: rank.step(0.3 * LEASED_WAIT)) for _ in range(4)]
    assert steps == [False, False, False, True]
    assert is_whole(lambda: rank.hears(wire.PushDone("d-1", number), 0))
    rank.hears(wire.PushDone("d-1", number), 1)
    assert rank.results.take() == OK


def test_blocks_are_written_when_every_rank_of_p_has_written(rank: Rank) -> None:
    number = generation(registered(rank))
    rank.hears(wire.PushDone("d-1", number), 0)
    rank.hears(wire.PushDone("d-1", number), 0)
    rank.hears(wire.PushDone("d-1", number), 7)
    assert not rank.results.take()
    rank.hears(wire.PushDone("d-1", number), 1)
    assert rank.results.take() == OK


def test_a_rank_that_will_not_write_makes_the_others_stop_and_the_load_fails_at_once(
    rank: Rank,
) -> None:
    number = generation(registered(rank))
    rank.hears(wire.PushFailed("d-1", number, "no"), 0)
    assert rank.results.take() == FAILED
    assert [(name, type(one)) for name, one in rank.sent()] == [("agent-1", wire.Withdraw)]
    rank.apply(StepMetadata((Fence("d-1"),)))
    rank.step()
    assert not rank.results.take()
    rank.hears(wire.PushDone("d-1", number), 1)
    assert rank.results.take() == FREE


def test_blocks_that_will_be_computed_are_reported_when_no_rank_can_write_any_more(
    rank: Rank,
) -> None:
    number = generation(registered(rank, recomputes=True))
    rank.hears(wire.PushFailed("d-1", number, "no"), 0)
    assert not rank.results.take()
    rank.hears(wire.PushDone("d-1", number), 1)
    assert rank.results.take() == FAILED


def test_a_rank_that_does_not_answer_is_waited_for_as_long_as_it_said_that_it_might_write(
    rank: Rank,
) -> None:
    messages = registered(rank)
    rank.hears(wire.PushFailed("d-1", generation(messages), "no"), 0)
    rank.apply(StepMetadata((Fence("d-1"),)))
    assert messages[0].disagg is not None
    bound = messages[0].disagg.begin_by - CLOCK + WRITE_BOUND
    rank.step(bound)
    assert rank.results.take() == FAILED, "P's clock may be slower than ours"
    rank.step(bound * 2 * CLOCK_DRIFT)
    assert rank.results.take() == FREE


def test_only_the_rank_that_has_not_written_is_asked_again(rank: Rank) -> None:
    rank.hears(wire.PushDone("d-1", generation(registered(rank))), 0)
    rank.sent()
    rank.step(rank.config.heartbeat_interval)
    asked = [name for name, one in rank.sent() if isinstance(one, wire.PushRegistered)]
    assert asked == ["agent-1"]


GIVEN_BACK = TransferResults(returned=frozenset(["d-1"]))


def reclaimed(rank: Rank) -> int:
    """A registration whose blocks are asked back; returns its number."""
    number = generation(registered(rank))
    rank.apply(StepMetadata((Reclaim("d-1"),)))
    rank.step()
    asked = [(name, one) for name, one in rank.sent() if isinstance(one, wire.ReturnBlocks)]
    message = wire.ReturnBlocks("d-1", number)
    assert asked == [("agent-0", message), ("agent-1", message)]
    return number


def gives_back(rank: Rank, number: int, their_rank: int) -> None:
    rank.hears(wire.PushFailed("d-1", number, "other requests", blocks_returned=True), their_rank)


def test_blocks_are_given_back_when_every_rank_of_p_has_said_so(rank: Rank) -> None:
    number = reclaimed(rank)
    gives_back(rank, number, 0)
    gives_back(rank, number, 0)
    gives_back(rank, number + 7, 1)
    assert not rank.results.take()
    gives_back(rank, number, 1)
    assert rank.results.take() == GIVEN_BACK
    rank.step(RETURNED_SECONDS / 2)
    assert not rank.results.take(), "other ranks of ours may not have them back"
    rank.apply(StepMetadata((ConfirmReturn("d-1"),)))
    assert rank.results.take() == FAILED
    assert (rank.stats.pushes_given_back, rank.stats.pushes_missed) == (1, 0)
    assert rank.loop.num_open == 1, "the heartbeats, which go on"


def registers_again(rank: Rank, number: int, *names: str) -> int:
    asked = [(name, one) for name, one in rank.sent() if isinstance(one, wire.PushRegistered)]
    assert tuple(name for name, _ in asked) == names
    assert asked[0][1].disagg is not None
    assert asked[0][1].disagg.generation > number
    return asked[0][1].disagg.generation


def given_back_in_vain(rank: Rank) -> int:
    """P gives back, and no engine orders the end. Returns the number of the new registration."""
    number = reclaimed(rank)
    for their_rank in (0, 1):
        gives_back(rank, number, their_rank)
    assert rank.results.take() == GIVEN_BACK
    rank.step(RETURNED_SECONDS)
    rank.step()
    return registers_again(rank, number, "agent-0", "agent-1")


def test_a_rank_registers_again_where_others_of_ours_have_been_written(rank: Rank) -> None:
    """No order ends the registration then."""
    again = given_back_in_vain(rank)
    for their_rank in (0, 1):
        rank.hears(wire.PushDone("d-1", again), their_rank)
    assert rank.results.take() == OK


def test_an_order_that_comes_when_a_rank_has_registered_again_ends_it_when_p_gives_back_anew(
    rank: Rank,
) -> None:
    again = given_back_in_vain(rank)
    rank.apply(StepMetadata((ConfirmReturn("d-1"),)))
    rank.step()
    gives_back(rank, again, 0)
    assert not rank.results.take()
    gives_back(rank, again, 1)
    assert rank.results.take() == FAILED


def test_blocks_that_were_reported_as_given_back_are_reported_again_when_nothing_writes_there(
    rank: Rank,
) -> None:
    """For the host reuses them at once: here P is silent after it was registered with again."""
    again = given_back_in_vain(rank)
    rank.hears(wire.PushFailed("d-1", again, "no"), 0)
    assert not rank.results.take(), "the other one may write yet"
    rank.hears(wire.PushDone("d-1", again), 1)
    assert rank.results.take() == FAILED


def test_where_one_rank_of_p_has_written_the_other_is_registered_with_again(rank: Rank) -> None:
    number = reclaimed(rank)
    gives_back(rank, number, 0)
    rank.hears(wire.PushDone("d-1", number), 1)
    assert not rank.results.take()
    again = registers_again(rank, number, "agent-0")
    rank.hears(wire.PushDone("d-1", number), 0)
    assert not rank.results.take(), "that is not the registration that counts"
    rank.hears(wire.PushDone("d-1", again), 0)
    assert rank.results.take() == OK


def test_a_rank_of_p_that_refuses_gives_nothing_back(launch: Launch) -> None:
    """Nor does one that says nothing: the request ends as ever."""
    rank = launch(1, 2)
    number = reclaimed(rank)
    gives_back(rank, number, 0)
    rank.hears(wire.PushFailed("d-1", number, "no"), 1)
    assert rank.results.take() == FAILED
    silent = launch(1, 2)
    gives_back(silent, reclaimed(silent), 0)
    silent.step(silent.config.push_deadline)
    assert silent.results.take() == FAILED


def test_a_prompt_is_ready_when_every_rank_of_p_holds_it(rank: Rank) -> None:
    target = PushTarget(rank.address, 2, "p-1", "t")
    rank.apply(StepMetadata((PushInquiry("d-1", target, b"x"),)))
    question = wire.AwaitPrompt("d-1", b"x", "p-1", "t")
    rank.step_until(lambda: len(rank.agent.sent) >= 4)
    asked = [(name, one) for name, one in rank.sent() if isinstance(one, wire.AwaitPrompt)]
    assert asked == [("agent-0", question), ("agent-1", question)]
    rank.hears(wire.PromptReady("d-1"), 0)
    rank.step(rank.config.heartbeat_interval)
    assert [name for name, one in rank.sent() if one == question] == ["agent-1"]
    assert not rank.results.take()
    rank.hears(wire.PromptReady("d-1"), 1)
    assert rank.results.take() == TransferResults(ready=frozenset(["d-1"]))
    assert rank.loop.num_open == 0


# Writing.


def offer(rank: Rank) -> None:
    rank.apply(StepMetadata((LeaseGrant("p-1", 30), PushOffer("p-1", ((1, 2),), 32, b"x"))))


def register(rank: Rank, their_rank: int, name: str = "p-1", generation: int = 1) -> None:
    message = push_registration(
        decode_engine_id="remote",
        decode_port=rank.address.port,
        decode_tp_size=rank.address.tp_size,
        local_block_ids=((5, 6),),
        remote_engine_id="us",
        remote_port=1,
        disagg=wire.PushExtension(generation, 0, 32, b"x", name, 1e9, their_rank),
    )
    rank.hears(wire.encode_registration(message), their_rank)


def test_each_rank_of_d_is_written_as_it_registers_and_blocks_are_freed_after_the_last(
    rank: Rank,
) -> None:
    register(rank, 0)
    offer(rank)
    register(rank, 0)
    rank.step_until(lambda: rank.agent.transfers)
    finish(rank, DONE)
    assert not rank.results.take()
    register(rank, 1)
    rank.step_until(lambda: len(rank.agent.transfers) == 2)
    finish(rank, DONE, DONE)
    assert rank.results.take() == SENT
    assert rank.stats.pushes_ok == 2


def test_ranks_that_register_before_the_prefill_ends_are_all_written(rank: Rank) -> None:
    register(rank, 0)
    register(rank, 1)
    offer(rank)
    rank.step_until(lambda: len(rank.agent.transfers) == 2)
    finish(rank, DONE, DONE)
    assert rank.results.take() == SENT


def offer_partially(rank: Rank) -> None:
    """The first of its two blocks is computed."""
    rank.apply(StepMetadata((PartialOffer("p-1", ((1,),), 16, b"x"),)))


def test_each_rank_of_d_is_written_early_whenever_it_registers(rank: Rank) -> None:
    register(rank, 0)
    offer_partially(rank)
    rank.step_until(lambda: len(rank.agent.transfers) == 1)
    register(rank, 1)
    rank.step_until(lambda: len(rank.agent.transfers) == 2)
    finish(rank, DONE, DONE)
    assert rank.stats.early_writes == 2
    assert not rank.results.take()
    offer(rank)
    rank.step_until(lambda: len(rank.agent.transfers) == 4)
    finish(rank, DONE, DONE, DONE, DONE)
    assert rank.results.take() == SENT
    assert rank.stats.pushes_ok == 2


def test_blocks_of_a_rank_of_d_that_wants_them_back_are_written_no_more(rank: Rank) -> None:
    """And both ranks are written when they have registered again."""
    register(rank, 0)
    register(rank, 1)
    offer_partially(rank)
    rank.step_until(lambda: len(rank.agent.transfers) == 2)
    for their_rank in (0, 1):
        rank.hears(wire.ReturnBlocks("d-1", 1), their_rank)
    rank.step()
    assert not refusals(rank, 0), "a part is under way"
    finish(rank, DONE, DONE)
    assert refusals(rank, 2) == ["agent-0", "agent-1"]
    for their_rank in (0, 1):
        rank.hears(wire.AwaitPrompt("d-1", b"x", "p-1"), their_rank)
    rank.apply(StepMetadata((PartialOffer("p-1", ((1, 2),), 32, b"x"),)))
    rank.step()
    assert not [one for _, one in rank.sent() if isinstance(one, wire.PromptReady)]
    offer(rank)
    ready = [name for name, one in rank.sent() if isinstance(one, wire.PromptReady)]
    assert sorted(ready) == ["agent-0", "agent-1"]
    assert len(rank.agent.transfers) == 2
    for their_rank in (0, 1):
        register(rank, their_rank, generation=2)
    rank.step_until(lambda: len(rank.agent.transfers) == 4)
    finish(rank, DONE, DONE, DONE, DONE)
    assert rank.results.take() == SENT


def test_a_rank_that_registers_when_the_prefill_has_ended_joins_the_others(rank: Rank) -> None:
    register(rank, 0)
    offer_partially(rank)
    rank.step_until(lambda: len(rank.agent.transfers) == 1)
    offer(rank)
    finish(rank, DONE)
    rank.step_until(lambda: len(rank.agent.transfers) == 2)
    register(rank, 1)
    rank.step_until(lambda: len(rank.agent.transfers) == 3)
    finish(rank, DONE, DONE, DONE)
    assert rank.results.take() == SENT


def test_a_prefill_that_is_given_up_halfway_is_refused_to_every_rank(rank: Rank) -> None:
    register(rank, 0)
    offer_partially(rank)
    rank.step_until(lambda: rank.agent.transfers)
    rank.apply(StepMetadata((LeaseCancel("p-1"), Fence("p-1"))))
    rank.step()
    assert not rank.results.take()
    finish(rank, DONE)
    assert refusals(rank, 1) == ["agent-0"]
    assert rank.results.take() == SENT
    register(rank, 1)
    assert refusals(rank, 2) == ["agent-0", "agent-1"]


def test_ranks_that_withdraw_halfway_leave_nothing_to_wait_for(rank: Rank) -> None:
    register(rank, 0)
    offer_partially(rank)
    rank.step_until(lambda: rank.agent.transfers)
    for their_rank in (0, 1):
        rank.hears(wire.Withdraw("d-1", 1, "p-1"), their_rank)
    finish(rank, DONE)
    assert refusals(rank, 2) == ["agent-0", "agent-1"]
    offer(rank)
    assert rank.results.take() == SENT
    assert len(rank.agent.transfers) == 1


def refusals(rank: Rank, number: int) -> list[str]:
    """Who is told that nothing will be written, once so many are."""

    def told() -> list[str]:
        messages = [(name, wire.decode_notification(m)) for name, m in rank.agent.sent]
        return sorted(name for name, one in messages if isinstance(one, wire.PushFailed))

    rank.step_until(lambda: len(told()) == number)
    return told()


def test_a_rank_that_never_registers_does_not_keep_the_blocks_and_is_refused_later(
    rank: Rank,
) -> None:
    offer(rank)
    register(rank, 0)
    rank.step_until(lambda: rank.agent.transfers)
    finish(rank, DONE)
    rank.step(rank.config.transfer_timeout)
    assert rank.results.take() == SENT
    rank.sent()
    register(rank, 1)
    assert refusals(rank, 1) == ["agent-1"]


def test_a_rank_that_withdraws_is_not_waited_for(rank: Rank) -> None:
    offer(rank)
    register(rank, 0)
    rank.step_until(lambda: rank.agent.transfers)
    rank.hears(wire.Withdraw("d-1", 1, "p-1"), 1)
    assert not rank.results.take()
    finish(rank, DONE)
    assert rank.results.take() == SENT


@pytest.mark.parametrize(("ours", "theirs", "their_rank"), [(1, 2, 5), (2, 2, 1)])
def test_a_registration_of_a_rank_that_is_not_ours_to_write_is_refused(
    launch: Launch, ours: int, theirs: int, their_rank: int
) -> None:
    rank = launch(ours, theirs)
    offer(rank)
    register(rank, their_rank)
    rank.step()
    assert rank.agent.transfers == []
    assert rank.stats.pushes_failed == 1


def test_every_rank_of_d_hears_that_the_prefill_was_given_up(rank: Rank) -> None:
    register(rank, 0)
    rank.apply(StepMetadata((LeaseCancel("p-1"),)))
    register(rank, 1)
    assert refusals(rank, 2) == ["agent-0", "agent-1"]


def test_withdrawals_of_all_ranks_are_one_and_spare_the_next_attempt(rank: Rank) -> None:
    offer(rank)
    for their_rank in (0, 1):
        rank.hears(wire.Withdraw("d-1", 0, "p-1"), their_rank)
    assert rank.results.take() == SENT
    offer(rank)
    rank.step()
    assert not rank.results.take()


def test_ranks_that_call_one_request_by_other_names_leave_no_name_behind(rank: Rank) -> None:
    register(rank, 0, name="p-1")
    register(rank, 1, name="p-2")
    for their_rank in (0, 1):
        rank.hears(wire.Withdraw("d-1", 1, "p-3"), their_rank)
    offer(rank)
    rank.step()
    assert rank.loop.num_open == 2, "the offer and its lease, which wait for D"


# Holding.


def test_a_rank_that_renews_after_its_read_is_no_reader_that_still_waits(rank: Rank) -> None:
    rank.apply(StepMetadata((LeaseGrant("p-1", 30),)))
    rank.hears(wire.Read("p-1", readers=2, sequence=1), 0)
    rank.hears(wire.Renew(2, ("p-1",)), 0)
    rank.hears(wire.Renew(2, ("p-1",)), 1)
    assert not rank.results.take()
    rank.hears(wire.Read("p-1", readers=2, sequence=3), 1)
    assert rank.results.take() == SENT
    assert rank.stats.leases_revoked == 0
