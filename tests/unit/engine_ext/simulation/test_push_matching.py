"""Push mode as a state machine: what two engines and the network between them may do, in any order.

The simulation checks at every moment that each order is reported once, that what is accepted is the
KV that was asked for, and that no WRITE lands in blocks that were given back. At the end, once the
network is well again and all deadlines have passed, nothing may be left anywhere.
"""

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

from tests.unit.engine_ext.simulation.world import SimEngine, SimRequest, Weather, World

REGISTRATION_SECONDS = 40.0
TRANSFER_SECONDS = 30.0
FINALLY = REGISTRATION_SECONDS + TRANSFER_SECONDS + 120


class PushMachine(RuleBasedStateMachine):
    prefilling = Bundle("prefilling")
    loading = Bundle("loading")

    names = st.sampled_from(["x", "x", "x", "y"])
    """Few: attempts of one request have the same names, and meet each other's leftovers."""
    transfers = st.sampled_from([None, None, "t1", "t2"])

    @initialize(seed=st.integers(0, 1000))
    def begin(self, seed: int) -> None:
        self.world = World(seed)
        self.count = 0
        self.prefiller = self.make("p", 1)
        self.decoder = self.make("d", 2)

    def make(self, name: str, port: int) -> SimEngine:
        return self.world.engine(
            name,
            "push",
            port,
            registration_timeout=REGISTRATION_SECONDS,
            transfer_timeout=TRANSFER_SECONDS,
        )

    def unique(self, name: str) -> str:
        self.count += 1
        return f"cmpl-{name}-0-{self.count:08x}"

    @staticmethod
    def prompt(name: str) -> list[int]:
        return [ord(name) * 100 + position for position in range(10)]

    @rule(target=prefilling, name=names, transfer_id=transfers)
    def prefill_arrives(self, name: str, transfer_id: str | None) -> SimRequest:
        more = {} if transfer_id is None else {"transfer_id": transfer_id}
        return self.prefiller.prefill(self.unique(name), self.prompt(name), **more)

    @rule(leg=consumes(prefilling))
    def prefill_finishes(self, leg: SimRequest) -> None:
        self.prefiller.finish(leg)

    @rule(leg=consumes(prefilling))
    def prefill_is_aborted(self, leg: SimRequest) -> None:
        self.prefiller.abort(leg)

    @rule(target=loading, name=names, transfer_id=transfers)
    def decode_arrives(self, name: str, transfer_id: str | None) -> object:
        params = {
            "do_remote_prefill": True,
            "remote_engine_id": "p",
            "remote_host": "sim",
            "remote_port": 1,
            "remote_request_id": name,
            "transfer_id": transfer_id,
        }
        request = self.decoder.decode(self.unique(name), self.prompt(name), params)
        return multiple() if request is None else request

    @rule(request=consumes(loading))
    def decode_is_aborted(self, request: SimRequest) -> None:
        """Its blocks are the engine's again once the load has been reported."""
        if request.request_id in self.decoder.loading:
            self.decoder.abort(request)

    @rule(seconds=st.sampled_from([0.0, 0.1, 0.5, 2.0, 7.0, 45.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule(
        lose=st.sampled_from([0.0, 0.3, 1.0]),
        copies=st.sampled_from([1, 2]),
        delay=st.sampled_from([0.0, 1.0]),
        spread=st.sampled_from([0.0, 3.0]),
        transfer=st.sampled_from([0.01, 1.0, 20.0, 100.0]),
        handshake=st.sampled_from([0.01, 4.0, 20.0]),
    )
    def weather_changes(
        self,
        lose: float,
        copies: int,
        delay: float,
        spread: float,
        transfer: float,
        handshake: float,
    ) -> None:
        self.world.network.weather = Weather(lose, copies, delay, spread, transfer, handshake)

    @precondition(lambda self: self.world.network.weather == Weather())
    @rule(name=names)
    def a_pair_of_legs_in_good_weather_is_served(self, name: str) -> None:
        """Whatever happened before, unless an attempt with the same names is still about."""
        self.world.pass_time(FINALLY)
        leg = self.prefiller.prefill(self.unique(name), self.prompt(name), transfer_id="last")
        params = {
            "do_remote_prefill": True,
            "remote_engine_id": "p",
            "remote_host": "sim",
            "remote_port": 1,
            "remote_request_id": name,
            "transfer_id": "last",
        }
        request = self.decoder.decode(self.unique(name), self.prompt(name), params)
        assert request is not None
        self.world.pass_time(0.5)
        self.prefiller.finish(leg)
        self.world.pass_time(2.0)
        assert self.decoder.outcomes[request.request_id]

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.network.weather = Weather()
        self.world.pass_time(FINALLY)
        for request in list(self.decoder.loading.values()):
            raise AssertionError(f"{request.request_id} was never reported")
        assert not self.prefiller.held
        assert sorted(self.prefiller.free) == sorted(self.decoder.free)
        assert self.decoder.stats.pushes_active == 0
        assert self.prefiller.stats.leases_active == 0


TestPushMachine = PushMachine.TestCase
TestPushMachine.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
