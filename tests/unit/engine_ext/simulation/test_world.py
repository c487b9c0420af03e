"""The world is as unkind as it says, and each of its checks fails when what it checks is broken."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from engine_ext.common.orders import StepMetadata, TrackOrder
from engine_ext.common.types import FinishDecision, LoadProblem, PeerAddress, TransferResults
from engine_ext.worker.agent import TransferState
from tests.unit.engine_ext.simulation.agents import Freeze, SimTransfer
from tests.unit.engine_ext.simulation.pair import Pair, connected, tokens
from tests.unit.engine_ext.simulation.world import Violation, Weather

# Transfers.


def reading(weather: Weather, **config: Any) -> tuple[Pair, SimTransfer]:
    pair = connected("pull", **config)
    pair.world.network.weather = weather
    pair.ask()
    pair.world.until(lambda: pair.world.network.transfers)
    return pair, pair.world.network.transfers[0]


def test_giving_a_transfer_up_stops_nothing() -> None:
    pair, transfer = reading(Weather(transfer=2.0))
    pair.decoder.agent.discard(transfer)
    assert transfer.to_land
    pair.world.network.timeline.check = lambda: None
    pair.world.network.timeline.run_until(pair.world.now + 2.1)
    assert transfer.state is TransferState.DONE
    assert not transfer.to_land


def test_removing_a_remote_stops_nothing() -> None:
    pair, transfer = reading(Weather(transfer=2.0))
    pair.world.network.timeline.check = lambda: None
    pair.decoder.agent.remove_remote(pair.prefiller.agent.name)
    pair.world.network.timeline.run_until(pair.world.now + 2.1)
    assert transfer.state is TransferState.DONE


def test_the_blocks_of_a_transfer_move_one_by_one_and_are_read_as_they_move() -> None:
    pair, transfer = reading(Weather(transfer=4.0))
    network, ours, theirs = pair.world.network, pair.decoder.memory, pair.prefiller.memory
    network.timeline.check = lambda: None
    last = transfer.remote[-1]
    network.timeline.run_until(pair.world.now + 2.5)
    assert transfer.to_land == {2}
    theirs.contents[last] = (-7,)
    network.timeline.run_until(pair.world.now + 1.4)
    assert ours.contents[transfer.local[-1]] != (-7,)
    seen: list[object] = []
    network.timeline.check = lambda: seen.append(ours.contents[transfer.local[-1]])
    network.timeline.run_until(pair.world.now + 0.2)
    assert (-7,) in seen


@pytest.mark.parametrize(
    ("weather", "is_told"),
    [(Weather(transfer=1.0, fail=1.0), True), (Weather(transfer=1.0, never=1.0), False)],
)
def test_a_transfer_may_stop_in_the_middle(weather: Weather, is_told: bool) -> None:
    pair, transfer = reading(weather)
    assert len(transfer.to_land) < 3
    pair.world.network.timeline.run_until(pair.world.now + 1.1)
    assert not transfer.to_land
    assert transfer.is_running is not is_told


def test_a_write_lands_within_the_time_that_p_promised_unless_it_is_told_otherwise() -> None:
    for bounded in (True, False):
        pair = Pair("push", transfer_timeout=4.0, write_bound=5.0)
        pair.world.network.writes_are_bounded = bounded
        assert pair.is_served()
        pair.world.network.weather = Weather(transfer=20.0)
        pair.ask()
        pair.world.until(lambda network=pair.world.network: network.transfers)  # type: ignore[misc] # its own
        assert len(pair.world.network.transfers[0].to_land) == (0 if bounded else 2)


# Processes.


@pytest.mark.parametrize("emulated", [False, True])
def test_transfers_of_a_frozen_process_go_on_or_land_when_it_thaws(emulated: bool) -> None:
    pair, transfer = reading(Weather(transfer=2.0, emulated=emulated))
    pair.decoder.freeze(10.0)
    pair.world.network.timeline.run_until(pair.world.now + 9.0)
    assert len(transfer.to_land) == (2 if emulated else 0)
    pair.world.network.timeline.run_until(pair.world.now + 1.1)
    assert not transfer.to_land


def test_a_frozen_engine_does_nothing_while_the_others_go_on() -> None:
    pair = connected("pull", lease_duration=6.0)
    pair.ask()
    pair.decoder.freeze(20.0)
    pair.world.pass_time(15.0)
    assert len(pair.decoder.outcomes) == 1
    assert pair.prefiller.is_at_rest()


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("method", ["poll", "notifications", "start_read", "notify"])
def test_a_process_frozen_inside_a_call_returns_to_a_world_that_has_gone_on(
    method: str, moment: Any
) -> None:
    pair = connected("pull")
    pair.decoder.agent.freeze = Freeze(method, 7.0, moment)
    before = pair.world.now
    pair.ask()
    pair.world.pass_time(2.0)
    assert not _is_to_freeze(pair)
    assert pair.world.now >= before + 7.0
    assert pair.decoder.agent.clock_read_at <= pair.world.now


def _is_to_freeze(pair: Pair) -> bool:
    return pair.decoder.agent.freeze is not None


def test_no_two_engines_have_the_same_clock() -> None:
    pair = Pair("pull")
    clocks = [(engine.rate, engine.origin) for engine in pair.world.engines.values()]
    assert len({rate for rate, _ in clocks}) == len({origin for _, origin in clocks}) == 2
    assert all(0.98 <= rate <= 1.02 for rate, _ in clocks)


def trace_of(seed: int, hash_seed: str) -> str:
    command = [sys.executable, "-m", "tests.unit.engine_ext.simulation.run", "--trace"]
    made = subprocess.run(
        [*command, "--seed", str(seed)],
        env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert f"seed {seed}, " in made.stdout, made.stderr
    return made.stdout


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
def test_a_seed_replays_step_by_step_whatever_the_order_of_sets(seed: int) -> None:
    assert trace_of(seed, "1") == trace_of(seed, "2")


# Checks: each finds what is planted.

Planted = Callable[[Pair], object]


def keep_too_briefly(pair: Pair) -> None:
    """P's host gives leased blocks back after a while of its own choice."""
    finish = pair.prefiller.part_with

    def part_with(request: Any, decision: FinishDecision) -> None:
        finish(request, decision)
        pair.world.network.later(1.0, lambda: pair.prefiller.give_back(request))

    pair.prefiller.part_with = part_with  # type: ignore[method-assign] # planted


def early_news(pair: Pair) -> None:
    """A NIXL that calls transfers done when they begin."""
    agent = pair.decoder.agent if pair.mode == "pull" else pair.prefiller.agent

    def poll(transfer: SimTransfer) -> TransferState:
        if not transfer.has_told:
            transfer.has_told = True
            agent.network.send(agent.name, transfer.remote_name, transfer.notification)
        return TransferState.DONE

    agent.poll = poll  # type: ignore[method-assign] # planted


def refill(pair: Pair) -> None:
    """P's blocks are filled again while they are leased."""
    finish = pair.prefiller.part_with

    def part_with(request: Any, decision: FinishDecision) -> None:
        finish(request, decision)
        pair.prefiller.memory.fill(request.blocks, tokens(99))

    pair.prefiller.part_with = part_with  # type: ignore[method-assign] # planted


def abort_and_free(pair: Pair) -> None:
    """D's host gives the blocks of an aborted load back at once."""
    load = pair.decoder.load

    def load_and_leave(request: Any) -> bool:
        loads = load(request)
        pair.world.network.later(0.5, lambda: pair.decoder.give_back(request))
        return loads

    pair.decoder.load = load_and_leave  # type: ignore[method-assign] # planted


def change_hands(pair: Pair) -> None:
    """Blocks get another owner while they are loaded into."""
    load = pair.decoder.load

    def load_for_another(request: Any) -> bool:
        loads = load(request)
        blocks = list(request.blocks)
        pair.world.network.later(
            0.5, lambda: pair.decoder.memory.change_owner(blocks, "another request")
        )
        return loads

    pair.decoder.load = load_for_another  # type: ignore[method-assign] # planted


@pytest.mark.parametrize(
    ("mode", "planted", "found"),
    [
        ("pull", keep_too_briefly, "blocks while d trusts it"),
        ("pull", early_news, "accepted wrong KV"),
        ("push", early_news, "may touch it"),
        ("pull", refill, "accepted wrong KV"),
        ("push", refill, "accepted wrong KV"),
        ("pull", abort_and_free, "given back while READ"),
        ("push", abort_and_free, "given back while WRITE"),
        ("pull", change_hands, "changed hands during READ"),
        ("push", change_hands, "has landed in block"),
    ],
)
def test_a_block_that_goes_back_too_early_is_found(mode: str, planted: Planted, found: str) -> None:
    pair = connected(mode)
    planted(pair)
    pair.world.network.weather = Weather(transfer=2.0)
    with pytest.raises(Violation, match=found):
        _ask_and_wait(pair)


def _ask_and_wait(pair: Pair) -> None:
    pair.ask()
    pair.world.pass_time(5.0)


def running_kv_changes(pair: Pair) -> None:
    pair.count += 1
    leg = pair.prefiller.prefill("cmpl-x2-0-0000000a", tokens(2))
    params = pair.prefiller.finish(leg)
    request = pair.decoder.decode("cmpl-x2-0-0000000d", tokens(2), params, seconds=3.0)
    assert request is not None
    pair.world.pass_time(1.0)
    pair.decoder.memory.contents[request.blocks[0]] = (-7,)
    pair.world.pass_time(3.0)


def report_received_again(pair: Pair) -> None:
    pair.decoder.results.received("cmpl-x1-0-0000000d", ok=True)
    pair.world.pass_time(1.0)


def report_sent_again(pair: Pair) -> None:
    pair.world.pass_time(1.0)
    pair.prefiller.results.sent("cmpl-x1-0-0000000a")
    pair.world.pass_time(1.0)


def report_never(pair: Pair) -> None:
    def forget(request_id: str, *, ok: bool, problem: LoadProblem | None = None) -> None:
        pass

    pair.decoder.results.received = forget  # type: ignore[method-assign] # planted
    pair.ask()
    pair.world.settle(60.0)


def lose_a_block(pair: Pair) -> None:
    pair.world.pass_time(1.0)
    pair.decoder.free.pop()
    pair.world.settle(60.0)


def track_for_ever(pair: Pair) -> None:
    order = TrackOrder("nobody", PeerAddress("p", "sim", 1), "nothing")
    pair.decoder.loop.apply(StepMetadata((order,)), pair.decoder.clock())
    pair.world.settle(60.0)


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        (running_kv_changes, "changed while it ran"),
        (report_received_again, "was reported as received twice"),
        (report_sent_again, "was reported as sent twice"),
        (report_never, "never came to its end"),
        (lose_a_block, "1 blocks never came back"),
        (track_for_ever, "num_open stays at 1"),
    ],
)
def test_what_is_reported_twice_or_never_is_found(planted: Planted, found: str) -> None:
    pair = connected("pull")
    with pytest.raises(Violation, match=found):
        planted(pair)


def test_an_exception_out_of_a_hook_is_found() -> None:
    pair = Pair("pull")

    def raise_it(results: TransferResults) -> TransferResults:
        raise RuntimeError("planted")

    pair.decoder.scheduler.update_connector_output = raise_it  # type: ignore[method-assign] # planted
    with pytest.raises(RuntimeError, match="planted"):
        pair.is_served()
