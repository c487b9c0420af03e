"""One run from a seed: some engines, a router's traffic, and everything that goes wrong meanwhile.

What happens is drawn from the seed and put on the world's timeline, so that it goes on happening to
the others while one engine stands still in the middle of a call.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from random import Random
from typing import Any

from engine_ext.worker.agent import AgentError
from tests.unit.engine_ext.simulation.agents import Freeze
from tests.unit.engine_ext.simulation.forger import Forger
from tests.unit.engine_ext.simulation.memory import BLOCK_SIZE
from tests.unit.engine_ext.simulation.stock import StockHolder, StockReader
from tests.unit.engine_ext.simulation.world import (
    NEWER,
    OLDER,
    OURS,
    SimEngine,
    SimRequest,
    Weather,
    World,
)

KINDS = ("pull", "push", "turns")
"""The kinds that a seed may choose; `LOANS` is chosen by hand."""
LOANS = "loans"
METHODS = (
    "add_remote",
    "remove_remote",
    "prepare",
    "unprepare",
    "start_read",
    "start_write",
    "poll",
    "discard",
    "notify",
    "notifications",
)
LONGEST_PREFILL_LOAD = 30.0
"""The seconds of a prefill load: one each for connection, READ and answer, and several steps."""
PATIENCE = 4.0
"""Seconds between steps of an engine to which nothing happens."""
LAST = 900.0
"""Everything has come to its end in so many good seconds: a READ or a message may be minutes
late, a process stands still for a minute and a half, and then the deadlines begin."""

Params = dict[str, Any]


class Scenario:
    def __init__(
        self,
        seed: int,
        *,
        kind: str | None = None,
        bounded_writes: bool = True,
        mixes_versions: bool | None = None,
    ) -> None:
        """`kind` and `mixes_versions` (of the extension): by default the seed's."""
        self.seed = seed
        self.random = Random(seed)
        self.world = World(seed)
        self.network = self.world.network
        self.network.writes_are_bounded = bounded_writes
        self.kind = kind or self.random.choice(KINDS)
        is_mixed = self.random.random() < 0.25
        self.mixes_versions = is_mixed if mixes_versions is None else mixes_versions
        # Dice of its own: what else a seed does is what it did without.
        self.bytes = Random(f"bytes {seed}")
        self.faults = Random(f"faults {seed}")
        self.compares_checksums = self.kind != "push" and self.bytes.random() < 0.3
        self.spoils = 0.2 if self.compares_checksums else 0.0
        self.network.weather = Weather(flip=self.spoils, swap=self.spoils)
        self.forger = Forger(self.network, seed)
        self.count = 0
        self.is_storm = True
        self.ports = 0
        self.num_borrowed = 0
        self.prefillers = self._engines("p")
        self.decoders = self._engines("d")
        self.stock_reader = self._stock(StockReader, "stock-d")
        self.stock_holder = self._stock(StockHolder, "stock-p")

    def run(self) -> None:
        """Raises Violation."""
        self.begin()
        self.finish()

    def begin(self) -> None:
        """All that is to happen, and the time in which it does."""
        at = self.network.now
        for _ in range(self.random.randint(10, 30)):
            self.network.timeline.at(at, self.draw())
            at += self.random.choice([0.0, 0.3, 1.0, 2.0, 5.0, 10.0])
        self.network.timeline.run_until(at)

    def finish(self) -> None:
        """The storm is over: all is as it was, and a request is served."""
        self.is_storm = False
        for engine in self.all_engines:
            engine.agent.failing = set()
            engine.agent.freeze = None
        self.world.settle(LAST)
        self._serve_one()

    @property
    def all_engines(self) -> list[SimEngine]:
        return [*self.prefillers, *self.decoders]

    # What may happen.

    def draw(self) -> Callable[[], None]:
        actions: list[tuple[int, Callable[[], None]]] = [
            (10, self.request),
            (3, self.change_weather),
            (2, self.freeze),
            (3, self.freeze_in_a_call),
            (3, self.forge),
            (2, self.release),
            (2, self.break_nixl),
            (1, self.kill),
            (1, self.drain),
        ]
        weights = [weight for weight, _ in actions]
        return self.random.choices([action for _, action in actions], weights)[0]

    def request(self) -> None:
        prefiller = self.random.choice(self.prefillers)
        decoder = self.random.choice(self.decoders)
        if self.kind == "push":
            self._push(prefiller, decoder)
        elif self.kind == LOANS and self._holders(prefiller) and self.random.random() < 0.8:
            self._borrow(prefiller, decoder)
        elif self.stock_holder is not None and self.random.random() < 0.3:
            self._pull_from_stock(self.stock_holder, decoder)
        else:
            self._pull(prefiller, decoder, self._prompt(), {})

    def change_weather(self) -> None:
        if self.is_storm:
            calm = Weather(flip=self.spoils, swap=self.spoils)
            self.network.weather = self.random.choice(
                [calm, self.random_weather(), self.random_weather()]
            )

    def freeze(self) -> None:
        self.random.choice(self.all_engines).freeze(self._while())

    def freeze_in_a_call(self) -> None:
        method = self.random.choice([*METHODS, "poll", "notifications", "start_read", "notify"])
        moment = "before" if self.random.random() < 0.5 else "after"
        self.random.choice(self.all_engines).agent.freeze = Freeze(method, self._while(), moment)  # type: ignore[arg-type] # one of the two

    def forge(self) -> None:
        """Several at once: most make no sense."""
        target = self.random.choice(self.all_engines)
        for _ in range(8):
            speaker = None
            if self.random.random() < 0.3:
                speaker = self.random.choice(self.all_engines).agent.name
            if speaker != target.agent.name:
                self.forger.say(target.agent.name, speaker)

    def release(self) -> None:
        engine = self.random.choice(self.all_engines)
        if self.kind == LOANS and engine.can_act and self.random.random() < 0.5:
            engine.scheduler.end_turns()
            engine.wake()
        elif engine.can_act and engine.held:
            name = self.random.choice(list(engine.held))
            engine.scheduler.release(engine.name, name)
            self.network.note(engine.name, "is asked to release", name)
            engine.wake()

    def drain(self) -> None:
        engine = self.random.choice(self.all_engines)
        if engine.can_act:
            engine.scheduler.drain()
            self.network.note(engine.name, "drains")
            engine.wake()

    def break_nixl(self) -> None:
        agent = self.random.choice(self.all_engines).agent
        agent.failing = {self.random.choice(METHODS)}
        agent.fault = self.faults.choice([AgentError, RuntimeError])
        self.network.note(agent.name, "fails to", agent.failing)
        self.network.later(self.random.choice([0.1, 1.0, 10.0, 40.0]), partial(_mend, agent))

    def kill(self) -> None:
        """It comes back, as itself or as another."""
        group = self.random.choice([self.prefillers, self.decoders])
        engine = self.random.choice(group)
        if not engine.can_act:
            return
        engine.die()
        name = self.random.choice([engine.name, f"{engine.name}x"])
        self.network.later(
            self.random.choice([0.5, 5.0]), partial(self._replace, group, engine, name)
        )

    # Traffic.

    def _pull(
        self, prefiller: SimEngine, decoder: SimEngine, prompt: list[int], turn: Params
    ) -> None:
        name = self._name()
        leg = SimRequest(f"{name}-0000000a", prompt, {"do_remote_decode": True, **turn})
        leg.computes_for = self._soon()
        leg.then = partial(self._decode, prefiller, decoder, name, prompt)
        prefiller.when_able(partial(self._prefill, prefiller, leg))

    def _borrow(self, prefiller: SimEngine, decoder: SimEngine) -> None:
        """A router names engines whose caches hold a prefix, or held it. Sometimes several requests
        have it, and sometimes one engine does everything."""
        known = self.random.choice(_with_kv(self.random.choice(self._holders(prefiller))))
        holders = [one.as_holder(len(known.token_ids)) for one in self._holders(prefiller)]
        self.random.shuffle(holders)
        for _ in range(self.random.choice([1, 1, 1, 3])):
            prompt = [*known.token_ids, *self._prompt()[:4]]
            if self.random.random() < 0.7:
                self._pull(prefiller, decoder, prompt, {"holders": holders[:4]})
            else:
                leg = SimRequest(f"{self._name()}-00000000", prompt, {"holders": holders[:4]})
                leg.computes_for = self._soon()
                leg.then = self._count_borrowed
                prefiller.when_able(partial(self._prefill, prefiller, leg))

    def _count_borrowed(self, params: Params | None) -> None:
        self.num_borrowed += "borrowed_tokens" in (params or {})

    def _holders(self, reader: SimEngine) -> list[SimEngine]:
        """Engines with KV, if this one can ask them."""
        others = [one for one in self.all_engines if one.is_alive and one is not reader]
        return [one for one in others if _with_kv(one)] if reader.can_act else []

    def _prefill(self, prefiller: SimEngine, leg: SimRequest) -> None:
        prefiller.queue(leg)
        if self.random.random() < 0.1:
            self._abort_later(prefiller, leg)
        self._admit(prefiller, leg)

    def _admit(self, prefiller: SimEngine, leg: SimRequest) -> None:
        """It loads, waits for a loan or, sometimes, for blocks, or computes."""
        if leg.is_over or prefiller.load(leg):
            return
        is_short = "holders" in leg.kv_transfer_params and self.random.random() < 0.3
        if leg.request_id in prefiller.awaiting or is_short:
            again = partial(prefiller.when_able, partial(self._admit, prefiller, leg))
            self.network.later(self.random.choice([0.1, 0.5, 3.0]), again)
            return
        self.network.later(
            leg.computes_for, partial(prefiller.when_able, partial(_end, prefiller, leg))
        )

    def _decode(
        self,
        prefiller: SimEngine,
        decoder: SimEngine,
        name: str,
        prompt: list[int],
        params: Params | None,
    ) -> None:
        self._count_borrowed(params)
        if params is None or "remote_block_ids" not in params:
            return
        readers = [decoder]
        if self.random.random() < 0.2:  # A router that sends it twice.
            readers.append(self.random.choice(self.decoders))
        if self.stock_reader is not None and self.random.random() < 0.3:
            self.stock_reader.pull(prefiller.agent.name, params, prompt, self._soon())
        retains = self.kind == LOANS and self.faults.random() < 0.4
        if retains or (self.kind == "turns" and self.random.random() < 0.7):
            params = {**params, "retain": True}
        for number, reader in enumerate(readers):
            leg = SimRequest(f"{name}-000000d{number}", prompt, params)
            leg.computes_for = self._soon()
            leg.then = partial(self._turn, prefiller, reader, leg)
            self.network.later(
                self._soon(), partial(reader.when_able, partial(self._queue, reader, leg))
            )

    def _queue(self, decoder: SimEngine, leg: SimRequest) -> None:
        decoder.queue(leg)
        if self.random.random() < 0.2:
            self._abort_later(decoder, leg)
        self.network.later(self._soon(), partial(decoder.when_able, partial(_load, decoder, leg)))

    def _turn(
        self, prefiller: SimEngine, decoder: SimEngine, leg: SimRequest, params: Params | None
    ) -> None:
        """What was said so far, and some more."""
        if params is None or len(leg.token_ids) > 30 or not self.is_storm:
            return
        prompt = [*leg.token_ids, *(self.random.randrange(1000) for _ in range(4))]
        if self.kind == LOANS:
            params = self._with_holders(prefiller, params, len(leg.token_ids))
        again = partial(self._pull, prefiller, decoder, prompt, params)
        self.network.later(self._soon(), again)

    def _with_holders(self, reader: SimEngine, params: Params, num_tokens: int) -> Params:
        """A router may name a last turn, which the prefill engine may decline, and holders."""
        holders = [one.as_holder(num_tokens) for one in self._holders(reader)][:4]
        spoilt: list[Params] = [
            {},
            {"retained_until": 1.0},
            {"prefix_proof": {}},
            {"remote_engine_id": reader.name},
            {"remote_num_tokens": 1},
        ]
        return {**params, **self.faults.choice(spoilt), "holders": holders}

    def _pull_from_stock(self, holder: StockHolder, decoder: SimEngine) -> None:
        name, prompt = self._name(), self._prompt()
        params = holder.finish(f"{name}-0000000a", prompt)
        if params is not None:
            leg = SimRequest(f"{name}-0000000d", prompt, params, is_proven=False)
            decoder.when_able(partial(self._queue, decoder, leg))

    def _push(self, prefiller: SimEngine, decoder: SimEngine) -> None:
        """The two legs at once; some requests are tried again under the same name."""
        number = self.random.randint(1, 3) if self.random.random() < 0.3 else 0
        base = f"cmpl-again{number}-0" if number else self._name()
        prompt = [number] * 10 if number else self._prompt()
        self.count += 1
        transfer = f"t{self.count}" if self.random.random() < 0.5 else None
        params = _where(prefiller, base, transfer)
        leg = SimRequest(f"{base}-{self.count:07x}a", prompt, {"do_remote_decode": True})
        leg.kv_transfer_params["transfer_id"] = transfer
        leg.computes_for = self._soon()
        if self.random.random() < 0.5:
            self._compute_in_parts(prefiller, leg)
        prefiller.when_able(partial(self._prefill, prefiller, leg))
        if self.stock_reader is not None and self.random.random() < 0.3:
            self.stock_reader.register(prefiller, f"{base}-{self.count:07x}e", prompt)
            return
        waiting = SimRequest(f"{base}-{self.count:07x}d", prompt, params)
        waiting.computes_for = self._soon()
        decoder.when_able(partial(self._queue, decoder, waiting))

    def _compute_in_parts(self, prefiller: SimEngine, leg: SimRequest) -> None:
        """Its blocks are lost in between, perhaps, and all is computed again."""
        at, done = 0.0, 0
        while done < len(leg.prompt_token_ids):
            done = min(done + self.random.choice([2, 4, 5]), len(leg.prompt_token_ids))
            step = partial(prefiller.compute, leg, done)
            if self.random.random() < 0.3:
                step, done = partial(prefiller.preempt, leg), 0
            at += self._soon()
            self.network.later(at, partial(prefiller.when_able, step))
        leg.computes_for += at

    def _abort_later(self, engine: SimEngine, leg: SimRequest) -> None:
        self.network.later(self._soon(), partial(engine.when_able, partial(engine.abort, leg)))

    # At the end.

    def _serve_one(self) -> None:
        """Who came back under its old name may cost a request, or two, until that is noticed."""
        prefiller, decoder = self._able_pair()
        if prefiller is None or decoder is None:
            return
        if not any(self._is_served(prefiller, decoder) for _ in range(3)):
            self.network.violate(decoder.name, "a request in good weather was not served")
        self.world.settle(LAST)

    def _is_served(self, prefiller: SimEngine, decoder: SimEngine) -> bool:
        name, prompt = self._name(), self._prompt()
        leg = prefiller.prefill(f"{name}-0000000a", prompt)
        asked = f"{name}-0000000d"
        if self.kind == "push":
            decoder.decode(asked, prompt, _where(prefiller, name, None))
            self.network.timeline.run_until(self.network.now + 0.5)
            prefiller.finish(leg)
        else:
            decoder.decode(asked, prompt, prefiller.finish(leg))
        deadline = self.network.now + 60
        while asked not in decoder.outcomes and self.network.now < deadline:
            self.network.timeline.run_until(self.network.now + 1.0)
        return decoder.outcomes.get(asked, False)

    def _able_pair(self) -> tuple[SimEngine | None, SimEngine | None]:
        """Two of one version whose transfers have all ended, and who have room."""
        stuck = {
            name
            for transfer in self.network.transfers
            for name in (transfer.agent.name, transfer.remote_name)
        }
        able = [
            engine
            for engine in self.all_engines
            if engine.can_act and engine.agent.name not in stuck
        ]
        pairs = product((one for one in able if one in self.prefillers), able)
        fitting = (
            (prefiller, decoder)
            for prefiller, decoder in pairs
            if decoder in self.decoders and prefiller.version == decoder.version
        )
        return next(fitting, (None, None))

    # Chance.

    def _engines(self, name: str) -> list[SimEngine]:
        number = 2 if self.random.random() < 0.3 else 1
        return [self._engine(f"{name}{index + 1}") for index in range(number)]

    def _engine(self, name: str, port: int | None = None, version: int | None = None) -> SimEngine:
        choose = self.random.choice
        if port is None:
            self.ports += 1
            port = self.ports
        load_timeout = self.bytes.choice([1.0, 20.0]) if self.kind == LOANS else 1.0
        versions = (OURS, NEWER, OLDER) if self.mixes_versions else (OURS,)
        engine = self.world.engine(
            name,
            "push" if self.kind == "push" else "pull",
            port,
            version=version or choose(versions),
            lease_duration=choose([6.0, 12.0, 30.0]),
            transfer_timeout=choose([5.0, 20.0]),
            write_bound=choose([10.0, 40.0]),
            landing_seconds=choose([1.0, 10.0]),
            registration_timeout=choose([20.0, 40.0]),
            handshake_timeout=choose([1.0, 5.0]),
            loan_timeout=self.bytes.choice([0.25, 1.0, 3.0]),
            load_failure_policy=choose(["fail", "recompute"]),
            bidirectional=self.kind in ("turns", LOANS),
            retain_seconds=choose([10.0, 30.0]),
            recompute_threshold=4,
            checksums=self.compares_checksums and self.bytes.random() < 0.9,
            prefill_load_timeout=load_timeout,
        )
        engine.longest_step = PATIENCE
        engine.longest_prefill_load = LONGEST_PREFILL_LOAD + 3 * (load_timeout - 1.0)
        return engine

    def _replace(self, group: list[SimEngine], dead: SimEngine, name: str) -> None:
        version = dead.version if name == dead.name else None
        group[group.index(dead)] = self._engine(name, dead.identity.port, version)
        if name != dead.name:
            self.world.engines.pop(dead.name, None)

    def _stock(self, kind: type[Any], name: str) -> Any:
        self.ports += 1
        wanted = self.random.random() < 0.2 and (self.kind == "pull" or kind is StockReader)
        return kind(self.network, name, self.ports) if wanted else None

    def random_weather(self) -> Weather:
        choose, chance = self.random.choice, self.random.random
        return Weather(
            lose=choose([0.0, 0.0, 0.1, 0.5, 1.0]),
            copies=choose([1, 1, 2]),
            delay=choose([0.0, 0.0, 1.0]),
            spread=choose([0.0, 0.5, 5.0]),
            transfer=choose([0.01, 0.5, 3.0, 30.0]),
            handshake=choose([0.01, 0.5, 4.0]),
            late=choose([0.0, 0.0, 0.1]),
            overrun=choose([0.0, 0.0, 0.3]),
            fail=choose([0.0, 0.0, 0.2]),
            never=choose([0.0, 0.0, 0.0, 0.1]),
            straggle=choose([0.0, 0.5]),
            held=choose([0.0, 0.5]),
            lag=choose([0.0, 0.05, 1.0]),
            emulated=chance() < 0.3,
            forget=self.faults.choice([0.0, 0.0, 0.3]),
            flip=self.spoils,
            swap=self.spoils,
        )

    def _while(self) -> float:
        return self.random.choice([0.5, 2.0, 8.0, 30.0, 90.0])

    def _soon(self) -> float:
        return self.random.choice([0.0, 0.0, 0.1, 0.5, 2.0, 8.0])

    def _name(self) -> str:
        self.count += 1
        return f"cmpl-x{self.count}-0"

    def _prompt(self) -> list[int]:
        self.count += 1
        return [self.count * 100 + i for i in range(self.random.choice([3, 8, 10, 14]))]


def _where(prefiller: SimEngine, name: str, transfer_id: str | None) -> Params:
    return {
        "do_remote_prefill": True,
        "remote_engine_id": prefiller.name,
        "remote_host": "sim",
        "remote_port": prefiller.identity.port,
        "remote_request_id": name,
        "transfer_id": transfer_id,
    }


def _with_kv(engine: SimEngine) -> list[SimRequest]:
    among = (*engine.held.values(), *engine.running.values())
    return [request for request in among if len(request.token_ids) >= BLOCK_SIZE]


def _mend(agent: Any) -> None:
    agent.failing = set()


def _end(prefiller: SimEngine, leg: SimRequest) -> None:
    if not leg.is_over:
        leg.then(prefiller.finish(leg))


def _load(decoder: SimEngine, leg: SimRequest) -> None:
    """Without room, or anything to load, the leg is given up."""
    if not leg.is_over and not decoder.load(leg):
        decoder.abort(leg)
