"""Pull, push and turns as state machines: what engines, a router and everything between them may
do, in any order, with loss, revocation, standstill and forgery in one run.

The world checks at every event that no block goes back while anything may touch it, that no wrong
KV is accepted and that each order is reported once. At the end, once the network is well again and
all deadlines have passed, nothing may be left anywhere.
"""

from functools import partial
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    multiple,
    precondition,
    rule,
)

from tests.unit.engine_ext.simulation.agents import Freeze
from tests.unit.engine_ext.simulation.forger import Forger
from tests.unit.engine_ext.simulation.scenario import METHODS, PATIENCE
from tests.unit.engine_ext.simulation.world import CALM, SimEngine, SimRequest, Weather, World

Params = dict[str, Any]

PREFILLER: Params = {"lease_duration": 6.0, "transfer_timeout": 60.0}
DECODER: Params = {"lease_duration": 30.0, "transfer_timeout": 5.0}
"""Neither has the other's settings."""
COMMON: Params = {
    "write_bound": 70.0,
    "landing_seconds": 10.0,
    "registration_timeout": 30.0,
    "retain_seconds": 20.0,
    "recompute_threshold": 4,
}
FINALLY = 900.0

weathers = st.one_of(
    st.just(CALM),
    st.builds(
        Weather,
        lose=st.sampled_from([0.0, 0.3, 1.0]),
        copies=st.sampled_from([1, 2]),
        delay=st.sampled_from([0.0, 1.0]),
        spread=st.sampled_from([0.0, 3.0]),
        transfer=st.sampled_from([0.01, 1.0, 8.0, 40.0]),
        handshake=st.sampled_from([0.01, 4.0, 20.0]),
        late=st.sampled_from([0.0, 0.2]),
        overrun=st.sampled_from([0.0, 0.3]),
        fail=st.sampled_from([0.0, 0.2]),
        never=st.sampled_from([0.0, 0.1]),
        straggle=st.sampled_from([0.0, 0.5]),
        held=st.sampled_from([0.0, 0.5]),
        lag=st.sampled_from([0.0, 0.5]),
        emulated=st.booleans(),
    ),
)
seconds = st.sampled_from([0.0, 0.1, 0.5, 2.0, 7.0, 45.0])
sides = st.sampled_from(["prefiller", "decoder"])


class Machine(RuleBasedStateMachine):
    """Two engines, and what may happen to them whatever they do."""

    MODE = "pull"

    @initialize(
        seed=st.integers(0, 1000),
        policy=st.sampled_from(["fail", "recompute"]),
        weather=weathers,
    )
    def begin(self, seed: int, policy: str, weather: Weather) -> None:
        self.world = World(seed)
        self.world.network.weather = weather
        self.forger = Forger(self.world.network, seed)
        self.count = 0
        self.arrived: list[tuple[SimEngine, SimRequest]] = []
        self.prefiller = self.make("p", 1, **PREFILLER)
        self.decoder = self.make("d", 2, load_failure_policy=policy, **DECODER)

    def make(self, name: str, port: int, **config: Any) -> SimEngine:
        is_turning = self.MODE == "turns"
        mode = "push" if self.MODE == "push" else "pull"
        engine = self.world.engine(name, mode, port, bidirectional=is_turning, **COMMON, **config)
        engine.longest_step = PATIENCE
        return engine

    def unique(self, name: str) -> str:
        self.count += 1
        return f"cmpl-{name}-0-{self.count:08x}"

    @staticmethod
    def prompt(name: str) -> list[int]:
        return [ord(name) * 100 + position for position in range(10)]

    def engine_of(self, side: str) -> SimEngine:
        return self.prefiller if side == "prefiller" else self.decoder

    @rule(seconds=seconds)
    def time_passes(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule(weather=weathers)
    def weather_changes(self, weather: Weather) -> None:
        self.world.network.weather = weather

    @rule(side=sides, seconds=st.sampled_from([1.0, 10.0, 60.0]))
    def an_engine_stands_still(self, side: str, seconds: float) -> None:
        self.engine_of(side).freeze(seconds)

    @rule(
        side=sides,
        method=st.sampled_from(METHODS),
        moment=st.sampled_from(["before", "after"]),
        seconds=st.sampled_from([1.0, 10.0, 60.0]),
    )
    def an_engine_will_stand_still_in_a_call(
        self, side: str, method: str, moment: Any, seconds: float
    ) -> None:
        self.engine_of(side).agent.freeze = Freeze(method, seconds, moment)

    @rule(side=sides, number=st.integers(1, 10))
    def a_stranger_speaks(self, side: str, number: int) -> None:
        for _ in range(number):
            self.forger.say(self.engine_of(side).agent.name)

    @rule(side=sides)
    def a_lease_is_revoked(self, side: str) -> None:
        engine = self.engine_of(side)
        if engine.can_act and engine.held:
            engine.scheduler.release(engine.name, next(iter(engine.held)))
            engine.wake()

    @rule(side=sides, method=st.sampled_from(METHODS), seconds=seconds)
    def nixl_fails_for_a_while(self, side: str, method: str, seconds: float) -> None:
        agent = self.engine_of(side).agent
        agent.failing = {method}
        self.world.pass_time(seconds)
        agent.failing = set()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for engine in (self.prefiller, self.decoder):
            engine.agent.freeze = None
        for engine, request in self.arrived:
            engine.when_able(partial(self.give_up, engine, request))
        self.world.settle(FINALLY)

    def arrives(self, engine: SimEngine, request: SimRequest) -> SimRequest:
        self.arrived.append((engine, request))
        return engine.queue(request)

    @staticmethod
    def give_up(engine: SimEngine, request: SimRequest) -> None:
        """What only waits for the router waits no longer, nor does a prompt half computed."""
        if not request.blocks or request.request_id in engine.computing:
            engine.abort(request)

    def abort(self, engine: SimEngine, request: SimRequest) -> None:
        engine.when_able(lambda: engine.abort(request))


class PullMachine(Machine):
    prefilling = Bundle("prefilling")
    answers = Bundle("answers")
    queued = Bundle("queued")
    loading = Bundle("loading")

    @rule(target=prefilling, name=st.sampled_from(["x", "y"]))
    def prefill_arrives(self, name: str) -> object:
        if not self.prefiller.can_act:
            return multiple()
        params = {"do_remote_decode": True}
        leg = SimRequest(self.unique(name), self.prompt(name), params)
        return self.arrives(self.prefiller, leg)

    @rule(target=answers, leg=consumes(prefilling))
    def prefill_finishes(self, leg: SimRequest) -> object:
        if not self.prefiller.can_act:
            return multiple()
        params = self.prefiller.finish(leg)
        return multiple() if params is None else (params, leg.prompt_token_ids)

    @rule(leg=consumes(prefilling))
    def prefill_is_aborted(self, leg: SimRequest) -> None:
        self.abort(self.prefiller, leg)

    @rule(target=loading, name=st.sampled_from(["x", "y"]), queued=seconds)
    def a_request_is_prefilled_queues_and_loads(self, name: str, queued: float) -> object:
        """The usual way, at once."""
        if not (self.prefiller.can_act and self.decoder.can_act):
            return multiple()
        prompt = self.prompt(name)
        params = self.prefiller.finish(self.prefiller.prefill(self.unique(name), prompt))
        leg = self.answer(prompt, params)
        self.arrives(self.decoder, leg)
        self.world.network.later(queued, partial(self.decoder.when_able, partial(self.load, leg)))
        return leg

    def answer(self, prompt: list[int], params: Params | None) -> SimRequest:
        return SimRequest(self.unique("d"), prompt, params, computes_for=1.0)

    def load(self, leg: SimRequest) -> None:
        if not leg.is_over and not leg.blocks and not self.decoder.load(leg):
            self.decoder.abort(leg)

    @rule(target=queued, answer=answers)
    def decode_arrives(self, answer: tuple[Params, list[int]]) -> object:
        """Some answers go to D more than once."""
        if not self.decoder.can_act:
            return multiple()
        params, prompt = answer
        return self.arrives(self.decoder, self.answer(prompt, params))

    @rule(target=loading, leg=consumes(queued))
    def decode_is_scheduled(self, leg: SimRequest) -> object:
        if not self.decoder.can_act:
            self.abort(self.decoder, leg)
        elif self.decoder.load(leg):
            return leg
        else:
            self.decoder.abort(leg)
        return multiple()

    @rule(leg=consumes(queued))
    def decode_is_aborted_in_the_queue(self, leg: SimRequest) -> None:
        self.abort(self.decoder, leg)

    @rule(leg=consumes(loading))
    def decode_is_aborted(self, leg: SimRequest) -> None:
        """Its blocks are the engine's again once the load has been reported."""
        self.abort(self.decoder, leg)


class TurnMachine(PullMachine):
    """D keeps what it has answered; the next turn's prefill reads it."""

    MODE = "turns"

    def answer(self, prompt: list[int], params: Params | None) -> SimRequest:
        leg = super().answer(prompt, params and {**params, "retain": True})
        leg.then = partial(self._next_turn, leg)
        return leg

    def _next_turn(self, leg: SimRequest, kept: Params | None) -> None:
        if kept is None:
            return
        prompt = [*leg.token_ids, 1, 2, 3, 4]
        params = {**kept, "do_remote_decode": True}
        turn = SimRequest(self.unique("t"), prompt, params, computes_for=0.5)
        turn.then = partial(self._decode_turn, turn)
        prefill = partial(self.prefiller.when_able, partial(self._prefill, turn))
        self.world.network.later(3.0, prefill)

    def _decode_turn(self, turn: SimRequest, params: Params | None) -> None:
        """Not kept: turns come to an end."""
        leg = SimRequest(self.unique("d"), turn.prompt_token_ids, params, computes_for=0.5)
        self.decoder.when_able(partial(self._queue_and_load, leg))

    def _queue_and_load(self, leg: SimRequest) -> None:
        self.decoder.queue(leg)
        self.load(leg)

    def _prefill(self, turn: SimRequest) -> None:
        self.prefiller.queue(turn)
        if not self.prefiller.load(turn):
            turn.then(self.prefiller.finish(turn))

    @rule()
    def the_decoder_drains(self) -> None:
        if self.decoder.can_act:
            self.decoder.scheduler.drain()
            self.decoder.wake()


class PushMachine(Machine):
    MODE = "push"
    prefilling = Bundle("prefilling")
    loading = Bundle("loading")

    names = st.sampled_from(["x", "x", "x", "y"])
    """Few: attempts of one request have the same names, and meet each other's leftovers."""
    transfers = st.sampled_from([None, None, "t1", "t2"])

    @rule(target=prefilling, name=names, transfer_id=transfers)
    def prefill_arrives(self, name: str, transfer_id: str | None) -> object:
        if not self.prefiller.can_act:
            return multiple()
        params = {"do_remote_decode": True, "transfer_id": transfer_id}
        leg = SimRequest(self.unique(name), self.prompt(name), params)
        return self.arrives(self.prefiller, leg)

    @rule(target=loading, name=names, transfer_id=transfers, prefilling=seconds)
    def both_legs_arrive(self, name: str, transfer_id: str | None, prefilling: float) -> object:
        """The usual way, at once."""
        if not (self.prefiller.can_act and self.decoder.can_act):
            return multiple()
        leg: Any = self.prefill_arrives(name, transfer_id)
        finish = partial(self.prefiller.when_able, partial(self.finish, leg))
        self.world.network.later(prefilling, finish)
        return self.decode_arrives(name, transfer_id)

    def finish(self, leg: SimRequest) -> None:
        if not leg.is_over:
            self.prefiller.finish(leg)

    @rule(leg=consumes(prefilling))
    def prefill_finishes(self, leg: SimRequest) -> None:
        self.prefiller.when_able(partial(self.finish, leg))

    @rule(leg=prefilling, num_tokens=st.sampled_from([4, 6, 8]))
    def prefill_goes_on(self, leg: SimRequest, num_tokens: int) -> None:
        if leg.num_computed_tokens < num_tokens:
            self.prefiller.when_able(partial(self.prefiller.compute, leg, num_tokens))

    @rule(leg=prefilling)
    def prefill_is_preempted(self, leg: SimRequest) -> None:
        self.prefiller.when_able(partial(self.prefiller.preempt, leg))

    @rule(leg=consumes(prefilling))
    def prefill_is_aborted(self, leg: SimRequest) -> None:
        self.abort(self.prefiller, leg)

    @rule(target=loading, name=names, transfer_id=transfers)
    def decode_arrives(self, name: str, transfer_id: str | None) -> object:
        if not self.decoder.can_act:
            return multiple()
        params = self.where(name, transfer_id)
        request = self.decoder.decode(self.unique(name), self.prompt(name), params, seconds=1.0)
        return multiple() if request is None else request

    @rule(request=consumes(loading))
    def decode_is_aborted(self, request: SimRequest) -> None:
        """Its blocks are the engine's again once the load has been reported."""
        self.abort(self.decoder, request)

    @precondition(lambda self: self.world.network.weather == CALM)
    @rule(name=names)
    def a_pair_of_legs_in_good_weather_is_served(self, name: str) -> None:
        """Whatever happened before, unless it still goes on."""
        self.prefiller.agent.freeze = self.decoder.agent.freeze = None
        self.world.pass_time(FINALLY)
        if self.world.network.transfers:
            return
        leg = self.prefiller.prefill(self.unique(name), self.prompt(name), transfer_id="last")
        where = self.where(name, "last")
        request = self.decoder.decode(self.unique(name), self.prompt(name), where)
        assert request is not None
        self.world.pass_time(0.5)
        self.prefiller.finish(leg)
        self.world.pass_time(2.0)
        assert self.decoder.outcomes[request.request_id]

    @staticmethod
    def where(name: str, transfer_id: str | None) -> Params:
        return {
            "do_remote_prefill": True,
            "remote_engine_id": "p",
            "remote_host": "sim",
            "remote_port": 1,
            "remote_request_id": name,
            "transfer_id": transfer_id,
        }


SETTINGS = settings(
    max_examples=100,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


TestPullMachine = PullMachine.TestCase
TestTurnMachine = TurnMachine.TestCase
TestPushMachine = PushMachine.TestCase
TestPullMachine.settings = TestTurnMachine.settings = TestPushMachine.settings = SETTINGS
