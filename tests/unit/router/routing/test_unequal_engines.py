"""`PrefillCost` in front of simulated prefill engines of different speed."""

import heapq
import random
from dataclasses import dataclass, field
from statistics import quantiles

import pytest

from router.fleet.engine import EngineLoad
from router.routing.chunk_index import ChunkIndex
from router.routing.policy import RoutingQuery
from router.routing.prefix_cache import CHOICES_PER_COMPARISON, PrefillCost
from router.routing.prompt_chunks import TOKENS_PER_CHUNK
from tests.unit.router.routing.engines import BOUND

PACE = 1 / 16_384
LEG_S = 0.015
SHARE_S = 0.2


@dataclass(slots=True, eq=False)
class Seen(EngineLoad):
    """An engine as one router sees it."""

    name: str
    cache_tokens: int = 4_000_000
    role: str = "prefill"
    preferred_role: str = "prefill"


@dataclass(slots=True)
class Run:
    """`slowness` of each engine. Prompts are turns of conversations, half of them new."""

    slowness: list[float]
    load: float
    learns: bool = True
    routers: int = 1
    prompts: int = 3000
    fleets: list[tuple[Seen, ...]] = field(init=False)
    choices: list[str] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = [f"p{number}" for number in range(len(self.slowness))]
        self.fleets = [tuple(Seen(name) for name in names) for _ in range(self.routers)]
        self._simulate([PrefillCost(BOUND, ChunkIndex()) for _ in self.fleets])

    def _simulate(self, policies: list[PrefillCost]) -> None:
        chance = random.Random(5)
        held: list[set[int]] = [set() for _ in self.slowness]
        free_at = [0.0] * len(self.slowness)
        running: list[tuple[float, int, Seen, PrefillCost, RoutingQuery, float, int, int]] = []
        talks: list[list[int]] = [[]]
        mean_s = 3000 * PACE + LEG_S
        rate = self.load * sum(1 / slow for slow in self.slowness) / mean_s
        now, shared = 0.0, 0.0
        for turn in range(self.prompts):
            now += chance.expovariate(rate)
            while running and running[0][0] <= now:
                end, _, engine, policy, query, sent, load, computed = heapq.heappop(running)
                if self.learns:
                    engine.note_prefill(sent, end, computed)
                policy.note_cached(engine.name, query, query.tokens - computed)
                engine.add_load(-1, -load)
            if now >= shared:
                shared = now + SHARE_S
                self._share_loads()
            talk = [] if chance.random() < 0.5 else chance.choice(talks[-50:])
            new = min(80, 1 + int(chance.lognormvariate(2, 0.8)))
            talk = [*talk, *(chance.getrandbits(48) for _ in range(new))][:128]
            talks.append(talk)
            query = RoutingQuery(turn, "", tuple(talk), len(talk) * TOKENS_PER_CHUNK)
            at = chance.randrange(self.routers)
            policy = policies[at]
            engine = policy.order(self.fleets[at], query)[0]
            number = int(engine.name[1:])
            cached = next((n for n, c in enumerate(talk) if c not in held[number]), len(talk))
            held[number].update(talk)
            computed = max(16, query.tokens - cached * TOKENS_PER_CHUNK)
            load = query.tokens - policy.expected_tokens(engine.name, query)
            policy.note_sent(engine.name, query)
            engine.add_load(1, load)
            seconds = self.slowness[number] * (LEG_S + computed * PACE)
            free_at[number] = end = max(now, free_at[number]) + seconds
            heapq.heappush(running, (end, turn, engine, policy, query, now, load, computed))
            self.choices.append(engine.name)
            self.waits.append(end - now)

    def _share_loads(self) -> None:
        for fleet in self.fleets:
            others = [other for other in self.fleets if other is not fleet]
            for number, engine in enumerate(fleet):
                legs = sum(other[number].in_flight for other in others)
                tokens = sum(other[number].tokens_in_flight for other in others)
                engine.set_load_elsewhere(legs, tokens)

    def ttft(self, percent: int) -> float:
        return quantiles(self.waits, n=100)[percent - 1]


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_unequal_fleet_answers_sooner_once_rates_are_learned(load: float) -> None:
    slowness = [0.5, 0.5, 1.5, 1.5]
    learned, blind = Run(slowness, load), Run(slowness, load, learns=False)
    assert learned.ttft(90) < 0.85 * blind.ttft(90)
    assert learned.ttft(99) < 0.85 * blind.ttft(99)


@pytest.mark.parametrize("load", [0.2, 0.9])
def test_equal_engines_get_the_same_prompts_as_without_rates(load: float) -> None:
    learned = Run([1.0] * 5, load)
    assert all(engine.prefill_rate.token_seconds for engine in learned.fleets[0])
    assert learned.choices == Run([1.0] * 5, load, learns=False).choices


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_each_of_several_routers_learns_the_same_rates(load: float) -> None:
    run = Run([0.5, 1.0, 2.0], load, routers=3, prompts=9000)
    for fleet in run.fleets:
        fast, mean, slow = (engine.prefill_rate.token_seconds for engine in fleet)
        assert mean / fast == pytest.approx(2.0, rel=0.25)
        assert slow / mean == pytest.approx(2.0, rel=0.25)


def test_forgotten_engine_counts_as_fast_as_the_mean_until_it_has_samples() -> None:
    fleet = tuple(Seen(f"p{number}") for number in range(3))
    policy = PrefillCost(BOUND, ChunkIndex())
    for engine, slow in zip(fleet, (1.0, 1.0, 4.0), strict=True):
        for number in range(20):
            engine.note_prefill(100.0 * number, 100.0 * number + slow, 10_000)
    query = RoutingQuery(1, "", (), 1000)
    assert policy.order(fleet, query)[-1].name == "p2"
    policy.forget("p2")
    fleet[0].add_load(1, 2000)
    fleet[1].add_load(1, 2000)
    assert policy.order(fleet, query)[0].name == "p2"


def test_engine_that_becomes_slow_loses_its_matches_to_faster_ones() -> None:
    fleet = tuple(Seen(f"p{number}") for number in range(3))
    policy = PrefillCost(BOUND, ChunkIndex())
    prompt = RoutingQuery(1, "", tuple(range(10)), 10 * TOKENS_PER_CHUNK)
    policy.order(fleet, prompt)
    policy.note_sent("p0", prompt)
    longer = RoutingQuery(2, "", tuple(range(30)), 30 * TOKENS_PER_CHUNK)
    assert policy.order(fleet, longer)[0].name == "p0"
    for engine, slow in zip(fleet, (6.0, 1.0, 1.0), strict=True):
        for number in range(20):
            engine.note_prefill(100.0 * number, 100.0 * number + slow, 10_000)
    for turn in range(CHOICES_PER_COMPARISON):
        policy.order(fleet, RoutingQuery(3 + turn))
    assert policy.order(fleet, longer)[0].name != "p0"
