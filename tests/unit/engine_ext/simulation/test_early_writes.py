"""Prompts that are pushed while they are computed: what may happen to either side in the middle.

The world checks that no wrong KV is accepted, that nothing lands in blocks that were given back,
and that no block is given back while a WRITE may touch it.
"""

import pytest

from engine_ext.wire.notifications import PushDone, decode_notification, encode_read_done
from engine_ext.worker.agent import TransferState
from tests.unit.engine_ext.simulation.agents import SimTransfer
from tests.unit.engine_ext.simulation.memory import BLOCK_SIZE, NUM_BLOCKS
from tests.unit.engine_ext.simulation.pair import LONGEST, Pair, connected, tokens
from tests.unit.engine_ext.simulation.world import CALM, SimRequest, Weather

PROMPT = tokens(9, 5 * BLOCK_SIZE - 1)
ASKED = "cmpl-x9-0-0000000d"
SLOW = Weather(transfer=2.0)
"""Seconds that a WRITE takes."""


class Halfway:
    """A pair that knows each other; P has a leg whose first blocks are computed, D waits."""

    def __init__(self, num_tokens: int = 2 * BLOCK_SIZE, weather: Weather = CALM) -> None:
        self.pair = Pair("push", transfer_timeout=30.0)
        assert self.pair.is_served()
        self.world, self.network = self.pair.world, self.pair.world.network
        self.prefiller, self.decoder = self.pair.prefiller, self.pair.decoder
        self.leg = self.prefiller.prefill("cmpl-x9-0-0000000a", PROMPT)
        self.waiting = self.register()
        self.world.pass_time(1.0)
        self.network.weather = weather
        self.compute(num_tokens)

    def register(self, name: str = ASKED) -> SimRequest:
        waiting = self.decoder.decode(name, PROMPT, self.pair.where("x9"))
        assert waiting is not None
        return waiting

    def compute(self, num_tokens: int) -> None:
        self.prefiller.compute(self.leg, num_tokens)

    def until_moving(self) -> SimTransfer:
        self.world.until(lambda: self.network.transfers)
        (transfer,) = self.network.transfers
        return transfer

    def until_written(self, num_writes: int) -> None:
        """So many in all, and they have ended."""
        self.world.until(
            lambda: self.network.num_writes == num_writes + 1 and not self.network.transfers
        )

    def until_begun(self) -> None:
        """The first part moves, or has ended where that takes no time."""
        if self.network.weather is SLOW:
            self.until_moving()
        else:
            self.until_written(1)

    def until_reported(self) -> bool:
        self.world.until(lambda: ASKED in self.decoder.outcomes, LONGEST)
        return self.decoder.outcomes[ASKED]

    def settle(self) -> None:
        self.network.weather = CALM
        self.world.pass_time(LONGEST)
        self.pair.assert_all_ended()


def test_what_is_computed_is_written_at_once_and_believed_when_all_is() -> None:
    halfway = Halfway()
    halfway.until_written(1)
    halfway.compute(4 * BLOCK_SIZE)
    halfway.until_written(2)
    halfway.world.pass_time(1.0)
    assert ASKED not in halfway.decoder.outcomes
    halfway.network.weather = SLOW
    halfway.prefiller.finish(halfway.leg)
    assert len(halfway.until_moving().local) == 1, "the last block alone"
    assert halfway.until_reported()
    assert halfway.prefiller.stats.early_writes == 2
    assert halfway.prefiller.stats.early_blocks == 4
    assert halfway.prefiller.stats.pushes_ok == 2
    said = [
        decode_notification(message)
        for sender, _, message in halfway.network.heard
        if sender == halfway.prefiller.agent.name
    ]
    assert len([one for one in said if one == PushDone(ASKED, 2)]) <= 1
    halfway.settle()


def test_what_stood_when_the_decoder_came_is_written_then() -> None:
    pair = connected("push")
    leg = pair.prefiller.prefill("cmpl-x9-0-0000000a", PROMPT)
    pair.prefiller.compute(leg, 3 * BLOCK_SIZE + 1)
    pair.world.pass_time(1.0)
    assert pair.world.network.num_writes == 1
    pair.decoder.decode(ASKED, PROMPT, pair.where("x9"))
    pair.world.until(lambda: pair.prefiller.stats.early_blocks == 3)
    pair.prefiller.finish(leg)
    pair.world.until(lambda: pair.decoder.outcomes.get(ASKED))
    pair.assert_all_ended()


def test_chunks_that_come_while_a_part_moves_go_together() -> None:
    halfway = Halfway(BLOCK_SIZE, SLOW)
    halfway.until_moving()
    for number in (2, 3, 4):
        halfway.compute(number * BLOCK_SIZE)
        halfway.world.pass_time(0.1)
    halfway.world.until(lambda: halfway.network.num_writes == 3)
    assert len(halfway.until_moving().local) == 3
    halfway.prefiller.finish(halfway.leg)
    assert halfway.until_reported()
    halfway.settle()


@pytest.mark.parametrize("weather", [CALM, SLOW])
def test_a_prompt_that_is_given_up_in_the_middle_is_not_believed(weather: Weather) -> None:
    halfway = Halfway(weather=weather)
    halfway.until_begun()
    halfway.prefiller.abort(halfway.leg)
    if weather is SLOW:
        transfer = halfway.until_moving()
        halfway.world.pass_time(0.5)
        assert halfway.prefiller.held, "its blocks are read yet"
        assert ASKED not in halfway.decoder.outcomes, "its blocks are written yet"
        halfway.world.until(lambda: transfer.state is TransferState.DONE)
    halfway.world.pass_time(0.5)
    assert not halfway.prefiller.held
    assert not halfway.until_reported()
    halfway.settle()


@pytest.mark.parametrize("weather", [CALM, SLOW])
def test_a_decoder_that_withdraws_in_the_middle_is_written_no_more(weather: Weather) -> None:
    halfway = Halfway(weather=weather)
    halfway.until_begun()
    halfway.decoder.abort(halfway.waiting)
    halfway.world.pass_time(0.5)
    assert bool(halfway.decoder.held) is (weather is SLOW), "its blocks wait for the part's end"
    halfway.compute(4 * BLOCK_SIZE)
    halfway.world.pass_time(3.0)
    assert not halfway.decoder.held
    halfway.prefiller.finish(halfway.leg)
    halfway.world.pass_time(0.5)
    assert halfway.prefiller.is_at_rest(), "P's blocks are freed at once"
    assert halfway.network.num_writes == 2
    halfway.settle()


def test_another_attempt_gets_what_the_one_that_left_was_written() -> None:
    halfway = Halfway()
    halfway.until_written(1)
    halfway.decoder.abort(halfway.waiting)
    halfway.world.pass_time(0.5)
    again = "cmpl-x9-0-0000000e"
    halfway.register(again)
    halfway.until_written(2)
    halfway.prefiller.finish(halfway.leg)
    halfway.world.until(lambda: halfway.decoder.outcomes.get(again))
    halfway.settle()


@pytest.mark.parametrize("weather", [CALM, SLOW])
def test_a_preempted_prompt_is_written_anew(weather: Weather) -> None:
    """In slow weather the part under way reads what others have put into P's blocks."""
    halfway = Halfway(weather=weather)
    halfway.until_begun()
    halfway.prefiller.preempt(halfway.leg)
    halfway.world.pass_time(0.1)
    halfway.compute(3 * BLOCK_SIZE)
    halfway.world.pass_time(5.0)
    assert halfway.prefiller.stats.early_blocks == 2 + 3
    halfway.prefiller.finish(halfway.leg)
    assert halfway.until_reported()
    halfway.settle()


def test_a_prompt_that_ends_right_after_it_was_preempted_is_written_anew() -> None:
    halfway = Halfway(4 * BLOCK_SIZE, SLOW)
    halfway.until_moving()
    halfway.prefiller.preempt(halfway.leg)
    memory = halfway.prefiller.memory
    others = memory.take(5, "another request")
    assert others is not None
    memory.fill(others, tokens(77, 5 * BLOCK_SIZE))
    halfway.prefiller.finish(halfway.leg)
    assert halfway.until_reported()
    memory.give_back(others)
    halfway.settle()


@pytest.mark.parametrize("withdrawn", ["before", "after", "by silence"])
def test_what_a_preempted_prompt_has_now_is_not_kept_for_a_part_that_never_ends(
    withdrawn: str,
) -> None:
    halfway = Halfway(4 * BLOCK_SIZE, Weather(transfer=2.0, never=1.0))
    halfway.until_moving()
    if withdrawn == "before":
        halfway.decoder.abort(halfway.waiting)
        halfway.world.pass_time(0.5)
    halfway.prefiller.preempt(halfway.leg)
    halfway.prefiller.finish(halfway.leg)
    halfway.world.pass_time(0.5)
    if withdrawn == "after":
        halfway.decoder.abort(halfway.waiting)
    if withdrawn == "by silence":
        halfway.decoder.die()
    halfway.world.pass_time(LONGEST)
    assert len(halfway.prefiller.free) == NUM_BLOCKS
    assert halfway.prefiller.stats.quarantined_blocks_active == 0
    if withdrawn != "by silence":
        assert not halfway.until_reported()
        assert len(halfway.decoder.free) == NUM_BLOCKS


def test_a_prompt_that_is_preempted_and_then_given_up_leaves_nothing() -> None:
    halfway = Halfway(weather=SLOW)
    halfway.until_moving()
    halfway.prefiller.preempt(halfway.leg)
    halfway.world.pass_time(0.1)
    halfway.prefiller.abort(halfway.leg)
    assert not halfway.until_reported()
    halfway.settle()


def test_what_a_prefiller_that_dies_in_the_middle_has_written_is_not_believed() -> None:
    halfway = Halfway(weather=SLOW)
    halfway.until_moving()
    halfway.prefiller.die()
    assert not halfway.until_reported()
    assert halfway.decoder.held or halfway.decoder.loading, "P's last bound is waited for"
    halfway.network.weather = CALM
    halfway.world.pass_time(LONGEST)
    halfway.decoder.assert_empty()


def test_nothing_is_written_once_the_decoder_has_not_asked_in_time() -> None:
    """It stands still; when it asks again it is written all that there is."""
    halfway = Halfway(BLOCK_SIZE)
    halfway.until_written(1)
    halfway.decoder.freeze(25.0)
    halfway.world.pass_time(20.0)
    halfway.compute(3 * BLOCK_SIZE)
    halfway.world.pass_time(1.0)
    assert halfway.network.num_writes == 2
    halfway.world.until(lambda: halfway.prefiller.stats.early_blocks == 1 + 3, 20.0)
    halfway.prefiller.finish(halfway.leg)
    assert halfway.until_reported()
    halfway.settle()


@pytest.mark.parametrize("method", ["start_write", "poll"])
def test_a_part_that_nixl_refuses_ends_the_request_and_the_next_is_served(method: str) -> None:
    halfway = Halfway(weather=SLOW)
    if method == "poll":
        halfway.until_moving()
    halfway.prefiller.agent.failing = {method}
    halfway.world.pass_time(5.0)
    halfway.prefiller.agent.failing = set()
    halfway.compute(4 * BLOCK_SIZE)
    halfway.prefiller.finish(halfway.leg)
    assert halfway.until_reported() is (method == "poll")
    halfway.settle()
    assert halfway.pair.is_served()


def test_a_part_that_fails_keeps_the_decoders_blocks_until_it_has_landed() -> None:
    halfway = Halfway(weather=Weather(transfer=2.0, fail=1.0, straggle=1.0))
    halfway.until_moving()
    assert not halfway.until_reported()
    halfway.prefiller.finish(halfway.leg)
    halfway.world.pass_time(0.5)
    assert halfway.prefiller.is_at_rest(), "nobody will come for it"
    halfway.settle()


def test_a_stranger_who_confirms_the_request_frees_no_block_that_is_read() -> None:
    halfway = Halfway(weather=SLOW)
    halfway.until_moving()
    stranger = halfway.network.agent("stranger")
    halfway.network.send(
        stranger.name, halfway.prefiller.agent.name, encode_read_done(halfway.leg.request_id)
    )
    halfway.world.pass_time(0.1)
    halfway.prefiller.finish(halfway.leg)
    halfway.world.pass_time(0.1)
    assert halfway.prefiller.held
    halfway.until_reported()
    halfway.settle()


def test_prompts_that_differ_are_not_written_early() -> None:
    pair = connected("push")
    leg = pair.prefiller.prefill("cmpl-x9-0-0000000a", PROMPT)
    pair.decoder.decode(ASKED, [*PROMPT[:-1], 1], pair.where("x9"))
    pair.world.pass_time(1.0)
    pair.prefiller.compute(leg, 3 * BLOCK_SIZE)
    pair.world.pass_time(1.0)
    assert pair.prefiller.stats.early_writes == 0
    pair.prefiller.finish(leg)
    pair.world.until(lambda: ASKED in pair.decoder.outcomes, LONGEST)
    assert not pair.decoder.outcomes[ASKED]
    pair.assert_all_ended()
