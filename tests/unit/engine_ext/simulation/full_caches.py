"""Push mode where neither cache has room for all that is asked for: a host that queues, and a story
that a seed makes up.

The host admits requests as vLLM's scheduler and the reference engine's do: the head of its queue
first, none past a head that finds no room, but past those that the connector leaves for later. It
computes prompts in chunks, grows answers, and preempts whom it admitted last. By the seed, it
allocates a prompt's blocks at once (the reference engine) or chunk by chunk (vLLM).

`python -m tests.unit.engine_ext.simulation.full_caches --seeds 1000` runs as many of each world.
"""

import argparse
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from engine_ext.common.config import ConnectorConfig
from engine_ext.common.types import FinishStatus
from engine_ext.scheduler.scheduler import SchedulerConnector
from tests.unit.engine_ext.simulation.engine import GEOMETRY, SimEngine, SimRequest
from tests.unit.engine_ext.simulation.memory import BLOCK_SIZE, NUM_BLOCKS, num_blocks_of
from tests.unit.engine_ext.simulation.network import Network
from tests.unit.engine_ext.simulation.scenario import Scenario
from tests.unit.engine_ext.simulation.timeline import Dice
from tests.unit.engine_ext.simulation.weather import Weather
from tests.unit.engine_ext.simulation.world import World

STEP_SECONDS = 0.05
CHUNK = 2 * BLOCK_SIZE
"""Tokens of a prompt that one step computes."""


class QueueingEngine(SimEngine):
    """`is_chunked`: a prompt's blocks are allocated as it is computed. `longest`: in blocks, where
    a load that was given back cannot wait again. `is_older`: others cannot ask it anything."""

    def __init__(
        self,
        network: Network,
        config: ConnectorConfig,
        port: int,
        *,
        is_chunked: bool = False,
        longest: int | None = None,
        is_older: bool = False,
        **options: Any,
    ) -> None:
        self.is_chunked = is_chunked
        self.longest = longest
        self.returns_blocks = not is_older
        self.waiting: list[SimRequest] = []
        """In the order in which they are admitted."""
        self.growing: set[str] = set()
        """Of those that run, the ones whose answers need one more block."""
        self.priorities: dict[str, int] = {}
        self.num_preempted = 0
        self._next_schedule = 0.0
        super().__init__(network, config, port, **options)

    def arrive(self, request: SimRequest, priority: int = 0, *, grows: bool = False) -> None:
        self.priorities[request.request_id] = priority
        if grows:
            self.growing.add(request.request_id)
        self.waiting.append(self.queue(request))
        self.waiting.sort(key=lambda one: self.priorities[one.request_id])

    def is_at_rest(self) -> bool:
        return super().is_at_rest() and not (self.is_alive and self.waiting)

    def abort(self, request: SimRequest) -> None:
        if request in self.waiting:
            self.waiting.remove(request)
        super().abort(request)

    def step(self) -> None:
        if self.can_act and self.network.now >= self._next_schedule:
            self._next_schedule = self.network.now + STEP_SECONDS
            self._compute_prompts()
            self._grow_answers()
            self._admit_waiting()
        super().step()

    def _due(self) -> None:
        if self.network.now < self._next_step:
            return
        self._next_step = float("inf")
        if not self.can_act:
            return
        self.step()
        if not self.is_at_rest():
            self._step_in(STEP_SECONDS)

    def new_scheduler(self) -> SchedulerConnector:
        if self.longest is None:
            return super().new_scheduler()
        geometry = replace(GEOMETRY, max_model_len=self.longest * BLOCK_SIZE)
        return SchedulerConnector(
            self.config,
            self.identity,
            geometry,
            self._unix_time,
            clock=self.shown,
            host_takes_back=False,
        )

    # What runs.

    def _compute_prompts(self) -> None:
        for request in list(self.computing.values()):
            if request.request_id not in self.computing:
                continue  # Preempted for the one before.
            until = min(request.num_prompt_tokens, request.num_computed_tokens + CHUNK)
            if not self._has_blocks_for(request, num_blocks_of(until)):
                continue
            self.compute(request, until)
            if until == request.num_prompt_tokens:
                del self.computing[request.request_id]
                if "do_remote_decode" in request.kv_transfer_params:
                    request.then(self._finish(request, FinishStatus.LENGTH_CAPPED))
                else:
                    self.run_request(request)

    def _has_blocks_for(self, request: SimRequest, num_blocks: int) -> bool:
        """It gets those that are missing from whoever was admitted last. False: it was that one."""
        while len(request.blocks) < num_blocks:
            fresh = self.memory.take(1, request.request_id)
            if fresh is not None:
                request.blocks += fresh
                continue
            victim = [*self.running.values(), *self.computing.values()][-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _grow_answers(self) -> None:
        for name in sorted(self.growing & self.running.keys()):
            request = self.running.get(name)
            if request is not None and self._has_blocks_for(request, len(request.blocks) + 1):
                self.growing.discard(name)

    def run_request(self, request: SimRequest) -> None:
        """Hosts say so of what was loaded, too, when it starts."""
        self.scheduler.update_state_after_alloc(request, (tuple(request.blocks),), 0)
        super().run_request(request)

    def _preempt(self, request: SimRequest) -> None:
        self._note("preempts", request.request_id)
        self.num_preempted += 1
        self.computing.pop(request.request_id, None)
        self.running.pop(request.request_id, None)
        self.scheduler.on_preempted(request.request_id)
        self.network.lose_source(self.agent, request.blocks)
        self._wait_again(request)

    def _wait_again(self, request: SimRequest) -> None:
        self.give_back(request)
        request.num_computed_tokens = 0
        self.waiting.insert(0, request)

    def fail_load(self, request: SimRequest) -> None:
        """Where it is computed instead, it waits for room first, as in vLLM and the reference
        engine."""
        if self.scheduler.load_failure_policy(request) == "fail":
            super().fail_load(request)
            return
        del self.outcomes[request.request_id]
        self._wait_again(request)

    # What waits.

    def _admit_waiting(self) -> None:
        for request in list(self.waiting):
            missing, _ = self.scheduler.get_num_new_matched_tokens(request, 0)
            if missing is None:
                continue
            num_blocks = num_blocks_of(request.num_prompt_tokens)
            at_once = 1 if self.is_chunked and not missing else num_blocks
            blocks = self.memory.take(at_once, request.request_id)
            if blocks is None:
                return
            self.waiting.remove(request)
            request.blocks, request.num_loading = blocks, missing
            self.scheduler.update_state_after_alloc(request, (tuple(blocks),), missing)
            where = self.loading if missing else self.computing
            where[request.request_id] = request
            self._note("admits", f"{request.request_id}: loads {missing} tokens into {blocks}")


@dataclass
class Asked:
    """One client's request, on its way through both engines."""

    name: str
    tokens: list[int]
    prefiller: QueueingEngine
    decoder: QueueingEngine
    turn: dict[str, Any] = field(default_factory=dict)
    """What D answered to the conversation's last request, for P's leg."""
    answer: dict[str, Any] | None = None
    """What D tells with its last token."""
    is_answered: bool = False
    priority: int = 0
    """At D; at P it is the other way round."""
    seconds: float = 0.0
    """That its answer takes."""
    grows: bool = False
    """Its answer takes one more block."""

    @property
    def at_decoder(self) -> str:
        return f"cmpl-{self.name}-0-0000000d"

    def arrive_at_p(self) -> None:
        params = {"do_remote_decode": True, **self.turn}
        leg = SimRequest(f"cmpl-{self.name}-0-0000000a", self.tokens, params)
        if self.prefiller.config.transfer_mode == "pull":
            leg.then = self._arrive_behind_p
        self.prefiller.arrive(leg, -self.priority)

    def arrive_at_d(self) -> None:
        """In push mode, whether P has heard of it or not."""
        if self.prefiller.config.transfer_mode == "push":
            where = {
                "do_remote_prefill": True,
                "remote_engine_id": self.prefiller.identity.engine_id,
                "remote_host": "sim",
                "remote_port": self.prefiller.identity.port,
                "remote_request_id": self.name,
                "proves_prefix": True,
            }
            self._arrive_at_d(where)

    def _arrive_behind_p(self, params: dict[str, Any] | None) -> None:
        assert params is not None
        self._arrive_at_d(params)

    def _arrive_at_d(self, params: dict[str, Any]) -> None:
        leg = SimRequest(self.at_decoder, self.tokens, {**params, "retain": True})
        leg.computes_for, leg.then = self.seconds, self._answered
        self.decoder.arrive(leg, self.priority, grows=self.grows)

    def _answered(self, params: dict[str, Any] | None) -> None:
        self.is_answered, self.answer = True, params


class Fleet:
    """One or two engines of each role, and clients that ask for more than fits."""

    def __init__(
        self,
        seed: int,
        mode: str = "push",
        *,
        longest: int | None = None,
        is_older: bool = False,
        has_both_roles: bool = False,
    ) -> None:
        """`longest`, `is_older`: of each `QueueingEngine`. `has_both_roles`: each engine prefills
        for the other one."""
        self.longest = longest or NUM_BLOCKS - 1
        self.dice = Dice(seed)
        self.world = World(seed)
        self.network = self.world.network
        self.mode = mode
        self.may_fail = is_older or has_both_roles
        """Requests may end badly, as long as they end."""
        prefillers, decoders, chunked, turns, rain, slow = self.dice.roll("fleet", 6)
        self.has_turns = turns < 0.5
        # Fewer lost messages in a row than make an engine seem dead. A READ is asked about once.
        is_rough = mode == "push"
        self.network.weather = Weather(
            delay=0.002,
            spread=0.01 * is_rough,
            copies=1 + (is_rough and rain > 0.75),
            lose=0.2 * (is_rough and rain < 0.25),
            losses_at_most=2,
            transfer=0.7 if slow < 0.3 else 0.01,
        )
        make = partial(QueueingEngine, is_chunked=chunked < 0.5, longest=longest, is_older=is_older)
        self.prefillers = [self._engine(f"p{i}", make) for i in range(1 + (prefillers < 0.4))]
        self.decoders = [self._engine(f"d{i}", make) for i in range(1 + (decoders < 0.4))]
        if has_both_roles:
            self.prefillers = [self.prefillers[0], self.decoders[0]]
            self.decoders = self.prefillers[::-1]
        self.has_both_roles = has_both_roles

    def run(self, within: float = 60.0) -> None:
        """All that is asked for is answered within so many seconds."""
        first = [self._asked(f"c{i}", i + 500, 1 + i % 3) for i in range(4)]
        if self.has_turns:
            self._send(first, is_crossed=False, within=5.0)
            self._wait_for(first, within)
        number, order, late = self.dice.roll("requests", 3)
        asked = [self._request(i, first) for i in range(4 + int(number * 8))]
        for one in asked:
            priority, seconds, grows = self.dice.roll(f"what {one.name} is like", 3)
            one.priority, one.seconds, one.grows = int(priority * 3), 2 * seconds, grows < 0.5
        self._send(asked, is_crossed=order < 0.5, within=0.5 + 2 * late)
        self._wait_for(asked, within)

    def settle(self) -> None:
        """Nothing is left when turns wait no more."""
        for engine in self.world.engines.values():
            engine.scheduler.drain()
        self.world.settle(60.0)

    def _wait_for(self, asked: list[Asked], within: float) -> None:
        deadline = self.world.now + within
        while not all(one.is_answered for one in asked):
            missing = [one.name for one in asked if not one.is_answered]
            assert self.world.now < deadline, f"{len(missing)} of {len(asked)} stand still"
            for one in asked:
                if one.decoder.outcomes.get(one.at_decoder) is False:
                    assert self.may_fail, f"{one.name} ended badly"
                    one.is_answered = True
            self.network.timeline.run_until(self.world.now + 0.25)

    def _request(self, number: int, first: list[Asked]) -> Asked:
        """Of any length that a cache has room for; some go on with a conversation."""
        (size,) = self.dice.roll(f"size of {number}", 1)
        most = self.longest - 1  # The answer takes one more, and may be kept.
        if not self.has_turns or number >= len(first):
            return self._asked(f"x{number}", number, 1 + int(size * most))
        last = first[number]
        asked = self._asked(f"t{number}", number, 4 + int(size * (most - 4)))
        asked.tokens = [*last.tokens, *asked.tokens[len(last.tokens) :]]
        asked.prefiller, asked.decoder = last.prefiller, last.decoder
        asked.turn = dict(last.answer or {})
        return asked

    def _asked(self, name: str, number: int, num_blocks: int) -> Asked:
        at_p, at_d, short = self.dice.roll(f"engines of {name}", 3)
        length = max(2, num_blocks * BLOCK_SIZE - int(short * BLOCK_SIZE))
        if self.has_both_roles:
            at_d = at_p
        return Asked(
            name,
            [number * 1000 + position for position in range(length)],
            self.prefillers[int(at_p * len(self.prefillers))],
            self.decoders[int(at_d * len(self.decoders))],
        )

    def _send(self, asked: list[Asked], *, is_crossed: bool, within: float) -> None:
        """`is_crossed`: the one that comes first to P comes last to D."""
        for index, one in enumerate(asked):
            at_p, at_d = self.dice.roll(f"legs of {one.name}", 2)
            if is_crossed:
                at_p, at_d = index / len(asked), 1 - index / len(asked)
            self.network.later(at_p * within, one.arrive_at_p)
            self.network.later(at_d * within, one.arrive_at_d)

    def _engine(self, name: str, make: Callable[..., QueueingEngine]) -> QueueingEngine:
        port = 1 + len(self.world.engines)
        engine = self.world.engine(
            name,
            self.mode,
            port,
            clock=(1.0, 0.0),
            make=make,
            bidirectional=self.has_turns,
            recompute_threshold=4,
        )
        assert isinstance(engine, QueueingEngine)
        return engine


class CrowdedScenario(Scenario):
    """Engines that die, freeze and lose messages, too: what no fault may break holds here as well,
    and all comes to an end, whether well or badly."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, kind="push")

    def finish(self) -> None:
        """When the last legs have arrived."""
        self.network.timeline.run_until(self.network.now + 10.0)
        super().finish()

    def request(self) -> None:
        name, priority = self._name(), self.random.randrange(3)
        prefiller = self.random.choice(self.prefillers)
        decoder = self.random.choice(self.decoders)
        prompt = [self.count * 1000 + i for i in range(self.random.choice([4, 30, 60, 85]))]
        leg = SimRequest(f"{name}-0000000a", prompt, {"do_remote_decode": True})
        where = {
            "do_remote_prefill": True,
            "remote_engine_id": prefiller.name,
            "remote_host": "sim",
            "remote_port": prefiller.identity.port,
            "remote_request_id": name,
        }
        waiting = SimRequest(f"{name}-0000000d", prompt, where, computes_for=self._soon())
        for engine, one in ((prefiller, leg), (decoder, waiting)):
            assert isinstance(engine, QueueingEngine)
            arrive = partial(engine.arrive, one, priority, grows=one is waiting)
            self.network.later(self._soon(), partial(engine.when_able, arrive))
            if self.random.random() < 0.2:
                self._abort_later(engine, one)

    def _abort_later(self, engine: SimEngine, leg: SimRequest) -> None:
        abort = partial(engine.when_able, partial(_abort_if_there, engine, leg))
        self.network.later(20 * self._soon(), abort)

    def _engine(self, name: str, port: int | None = None, version: int | None = None) -> SimEngine:
        make = partial(QueueingEngine, is_chunked=self.random.random() < 0.5)
        if port is None:
            self.ports += 1
            port = self.ports
        choose = self.random.choice
        return self.world.engine(
            name,
            "push",
            port,
            make=make,
            lease_duration=choose([6.0, 30.0]),
            transfer_timeout=choose([5.0, 20.0]),
            write_bound=choose([10.0, 40.0]),
            landing_seconds=choose([1.0, 10.0]),
            registration_timeout=choose([20.0, 40.0]),
            handshake_timeout=choose([1.0, 5.0]),
            load_failure_policy=choose(["fail", "recompute"]),
        )

    def random_weather(self) -> Weather:
        """A WRITE that never ends would keep the room that others wait for."""
        return replace(super().random_weather(), never=0.0)


def _abort_if_there(engine: SimEngine, leg: SimRequest) -> None:
    if leg.blocks or leg in getattr(engine, "waiting", ()):
        engine.abort(leg)


COMMAND = "python -m tests.unit.engine_ext.simulation.full_caches"
WORLDS: dict[str, Callable[[int], Fleet]] = {
    "push": Fleet,
    "pull": partial(Fleet, mode="pull"),
    "a host that cannot take requests back": partial(Fleet, longest=11),
}


def failure_of(world: str, seed: int) -> str | None:
    """What went wrong with this seed, in a line; None when nothing did."""
    fleet = WORLDS[world](seed)
    try:
        fleet.run()
        fleet.settle()
    except AssertionError as error:
        return str(error).partition("\n")[0]
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many of each world")
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    logging.getLogger("engine_ext").setLevel(logging.CRITICAL)
    num_failed = 0
    for world in WORLDS:
        for seed in range(options.first, options.first + options.seeds):
            problem = failure_of(world, seed)
            if problem is not None:
                num_failed += 1
                print(f"{world}, seed {seed}: {problem}", flush=True)
    print(f"{options.seeds} seeds of each world, {num_failed} failed")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
