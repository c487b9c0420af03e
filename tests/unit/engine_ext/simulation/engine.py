"""A small engine around the real scheduler half and the real loop: requests, a pool, and a clock.

It does with blocks what the hosts do (vLLM 0.32's scheduler, the reference engine's): a load that
failed ends its request, whose blocks stay where the scheduler half says so, or, by policy, is
computed into the same blocks at once. What no fault may break is checked where it happens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any

from engine_ext.common.config import ConnectorConfig
from engine_ext.common.orders import PullOrder
from engine_ext.common.prefix_hashes import VERSION, Keys
from engine_ext.common.types import (
    BlockIds,
    CacheGeometry,
    ConnectorStats,
    EngineIdentity,
    EngineRequest,
    FinishDecision,
    FinishStatus,
    Region,
    TransferResults,
)
from engine_ext.connector import push_of
from engine_ext.scheduler.report_deadlines import REPORT_SECONDS
from engine_ext.scheduler.scheduler import SchedulerConnector
from engine_ext.wire.dialer import PeerRank, PendingHandshake
from engine_ext.wire.errors import EXTENSION_VERSION
from engine_ext.wire.handshake import AgentMetadata, encode_payload
from engine_ext.worker.agent import TransferState
from engine_ext.worker.context import WorkerContext
from engine_ext.worker.loop import TransferLoop
from engine_ext.worker.results import PendingResults
from tests.unit.engine_ext.orders import ordered
from tests.unit.engine_ext.simulation.agents import SimAgent, SimTransfer
from tests.unit.engine_ext.simulation.memory import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    Memory,
    keys_of,
    num_blocks_of,
)
from tests.unit.engine_ext.simulation.network import Network, is_older

GEOMETRY = CacheGeometry(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, lends=True)
REGIONS = (Region("layer", 0x1000, 64, 64, NUM_BLOCKS),)
SHORTEST_STEP, LONGEST_STEP = 0.25, 1.0
"""Seconds between two steps of a loop to which nothing happens: more and more."""
FACTORS = {"model": "m"}
OURS = EXTENSION_VERSION
NEWER, OLDER = OURS + 1, OURS - 1
OLDER_PROOF = VERSION - 1

Then = Callable[[dict[str, Any] | None], None]


@dataclass(eq=False)
class SimRequest:
    """`engine_ext.common.types.EngineRequest`."""

    request_id: str
    prompt_token_ids: list[int]
    kv_transfer_params: Any = None
    num_computed_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    content_keys: Keys = ()
    num_loading: int = 0
    """Tokens whose KV comes from elsewhere."""
    loads_since: float = 0.0
    """World time; counted anew when its engine has stood still."""
    computes_for: float = 0.0
    """Seconds from its KV to its end."""
    is_proven: bool = True
    """False: its source is an engine that proves nothing, and what is loaded may be anything."""
    is_loan: bool = False
    """Blocks of other requests, which are lent."""
    is_over: bool = False
    """Finished, or aborted, as far as its client is concerned."""
    decision: FinishDecision | None = None
    then: Then = lambda params: None
    """Called with the answer's `kv_transfer_params` when it has come to a good end."""
    reads: list[SimTransfer] = field(default_factory=list)
    awaits_since: float | None = None
    """World time since which it awaits a loan, its own or another request's."""
    borrows_from: tuple[str, str] | None = None
    """The engine and the loan that it reads."""

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.answer

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def lease(self) -> tuple[str, str] | None:
        """The engine and the request whose blocks it means to read."""
        if self.borrows_from is not None:
            return self.borrows_from
        params = self.kv_transfer_params or {}
        if not params.get("remote_block_ids"):
            return None
        return params["remote_engine_id"], params["remote_request_id"]


@dataclass(frozen=True)
class SimBlocks:
    """`engine_ext.worker.checksums.Blocks`."""

    memory: Memory

    def read(self, region: Region, block_id: int) -> bytes:
        return repr(self.memory.contents[block_id]).encode()

    def settle(self) -> None:
        """All is in memory when an engine says so."""


class SimEngine:
    """`version`: of the extension; None for stock. An older one takes engines of other versions for
    stock, and has prefix proofs of its own. A newer one's proofs are as ours, so that between the
    two nothing but the handshake keeps them apart.

    `rate`, `origin`: of its clock, against the world's.
    """

    returns_blocks = True
    """Its handshake says that it answers `AwaitPrompt` and `ReturnBlocks`."""

    def __init__(
        self,
        network: Network,
        config: ConnectorConfig,
        port: int,
        *,
        version: int | None = OURS,
        rate: float = 1.0,
        origin: float = 0.0,
    ) -> None:
        self.network = network
        self.config = config
        self.version = version
        self.rate, self.origin = rate, origin
        self.name = config.engine_id
        self.identity = EngineIdentity(self.name, "sim", port, compat_factors=FACTORS)
        self.agent = network.agent(new_name(network, self.name))
        self.memory = self.agent.memory
        self.agent.compares_checksums = config.checksums and version == OURS
        self.agent.on_start = self._begins
        self.agent.on_wake = self.wake
        self.agent.on_thaw = self._thawed
        self.agent.write_seconds = config.write_bound / rate
        self.agent.landing_seconds = config.landing_seconds / rate
        self.results = PendingResults()
        self.stats = ConnectorStats()
        self.scheduler = self.new_scheduler()
        self.scheduler.lend_from(self)
        self.scheduler.borrow_with(self)
        self.loop = self._new_loop()
        self.loading: dict[str, SimRequest] = {}
        """Parked or orphaned: a load may write into their blocks."""
        self.computing: dict[str, SimRequest] = {}
        """P legs whose prompts are computed piece by piece."""
        self.awaiting: dict[str, SimRequest] = {}
        """Passed over: a loan is on its way."""
        self.running: dict[str, SimRequest] = {}
        self.held: dict[str, SimRequest] = {}
        """Finished, and their blocks kept until they are reported."""
        self.fenced: set[str] = set()
        """Of those, the ones that ended while they were loaded."""
        self.outcomes: dict[str, bool] = {}
        self.reports: set[str] = set()
        """Ids in `finished_sending`, ever."""
        self.may_free: Callable[[SimEngine, SimRequest], None] = lambda engine, request: None
        """Asked when a request's blocks are about to be free."""
        self.longest_loan = 0.0
        """Seconds from the grant of a loan until its blocks were back."""
        self.longest_step = LONGEST_STEP
        self.longest_prefill_load = float("inf")
        """Seconds that a prefill leg may wait for the last turn while this engine runs."""
        self._waiting: list[Callable[[], None]] = []
        self._next_step = float("inf")
        self._patience = SHORTEST_STEP
        network.listeners["sim", port] = handshake_payload(
            self.agent,
            self.name,
            version,
            config.lease_extension,
            config.write_bound,
            self.returns_blocks,
        )
        self.wake()

    # As a prefix cache that lends: `engine_ext.scheduler.loans.PrefixCache`.

    scheme = "simulated"

    def find(self, keys: Sequence[bytes]) -> BlockIds:
        known = takewhile(lambda block: block is not None, map(self.memory.cached.get, keys))
        found = tuple(block for block in known if block is not None)
        return (found,) if found else ()

    def pin(self, loan_id: str, block_ids: BlockIds) -> None:
        (blocks,) = block_ids
        self.memory.pin(blocks)
        loan = SimRequest(loan_id, [], blocks=list(blocks), is_loan=True)
        loan.loads_since = self.network.now
        self.held[loan_id] = loan
        self._note("lends", f"{blocks} as {loan_id}")

    # As an engine that borrows: `engine_ext.scheduler.loans.PromptKeys`.

    def keys_of(self, request: EngineRequest) -> Sequence[bytes]:
        return keys_of(request.token_ids)

    def as_holder(self, num_tokens: int) -> dict[str, Any]:
        """Return what a router that expects so many tokens here writes into a leg's params."""
        address = {"remote_engine_id": self.name, "remote_host": "sim"}
        port = {"remote_port": self.identity.port}
        return {**address, **port, "tp_size": 1, "expected_tokens": num_tokens}

    def __str__(self) -> str:
        return self.agent.name

    @property
    def free(self) -> list[int]:
        return self.memory.free

    @property
    def is_alive(self) -> bool:
        return self.agent.is_alive

    @property
    def can_act(self) -> bool:
        return self.agent.is_alive and not self.agent.is_frozen

    def clock(self) -> float:
        """Seconds, monotonic, its own; as the loop reads it."""
        self.agent.clock_read_at = self.network.now
        return self.shown()

    def shown(self) -> float:
        """What its clock shows."""
        return self.origin + self.rate * self.network.now

    def horizon(self, request_id: str) -> float:
        """Until when, by its own clock, this engine believes that what it reads for the request is
        what it asked for."""
        return self.loop.beats.horizon(request_id)

    # What arrives over HTTP.

    def prefill(self, request_id: str, tokens: list[int], **params: Any) -> SimRequest:
        """A P leg arrives."""
        request = SimRequest(request_id, tokens, {"do_remote_decode": True, **params})
        self._note("P leg arrives:", request_id)
        self._arrives(request)
        self.wake()
        return request

    def finish(self, request: SimRequest) -> dict[str, Any] | None:
        """A P leg has its one token: its blocks are leased; None where no block was free."""
        if not request.blocks and not self.begin(request):
            self.abort(request)
            return None
        del self.computing[request.request_id]
        self.compute_locally(request)
        return self._finish(request, FinishStatus.LENGTH_CAPPED)

    def begin(self, request: SimRequest) -> bool:
        """A P leg is admitted; False where no block is free."""
        blocks = self.memory.take(num_blocks_of(len(request.prompt_token_ids)), request.request_id)
        if blocks is None:
            return False
        request.blocks = blocks
        self.computing[request.request_id] = request
        self.scheduler.update_state_after_alloc(request, (tuple(blocks),), 0)
        return True

    def compute(self, request: SimRequest, num_tokens: int) -> None:
        """So far the prompt of a P leg has come after a step, which the next step tells."""
        if request.is_over or not (request.blocks or self.begin(request)):
            return
        self.memory.fill(request.blocks, request.prompt_token_ids[:num_tokens])
        request.num_computed_tokens = num_tokens
        self._note("has computed", f"{num_tokens} tokens of {request.request_id}")
        blocks = (tuple(request.blocks),)
        self.scheduler.on_step(request.request_id, blocks, num_tokens, num_new_tokens=1)
        self.wake()

    def preempt(self, request: SimRequest) -> None:
        """Its blocks go to others at once, whatever is written from them."""
        if request.request_id not in self.computing:
            return
        self._note("preempts", request.request_id)
        del self.computing[request.request_id]
        self.scheduler.on_preempted(request.request_id)
        self.network.lose_source(self.agent, request.blocks)
        self.give_back(request)
        request.num_computed_tokens = 0
        self.wake()

    def decode(
        self, request_id: str, tokens: list[int], params: Any, *, seconds: float = 0.0
    ) -> SimRequest | None:
        """A D leg arrives and, if there is room for it, loads at once."""
        request = SimRequest(request_id, tokens, params, computes_for=seconds)
        self._note("D leg arrives:", request_id)
        self._arrives(request)
        if not self.load(request):
            self.abort(request)
            return None
        return request

    def queue(self, request: SimRequest) -> SimRequest:
        """A leg arrives, and waits."""
        self._note("queues", request.request_id)
        self._arrives(request)
        self.wake()
        return request

    def _arrives(self, request: SimRequest) -> None:
        if is_older(self.version):
            params = _with_other_proof(request.kv_transfer_params)
            request.kv_transfer_params = params and {**params, "revocable": False}
        self.scheduler.on_new_request(request)

    def load(self, request: SimRequest) -> bool:
        """A request that has arrived is scheduled; False where nothing can be loaded, or no block
        is free."""
        missing, _ = self.scheduler.get_num_new_matched_tokens(request, 0)
        if missing is None:
            self.awaiting[request.request_id] = request
            if request.awaits_since is None:
                request.awaits_since = self.network.now
            self.wake()
            return False
        self.awaiting.pop(request.request_id, None)
        request.awaits_since = None
        if not missing:
            return False
        blocks = self.memory.take(num_blocks_of(len(request.prompt_token_ids)), request.request_id)
        if blocks is None:
            return False
        request.blocks, request.num_loading = blocks, missing
        request.loads_since = self.network.now
        self.scheduler.update_state_after_alloc(request, (tuple(blocks),), missing)
        self.loading[request.request_id] = request
        self._note("loads", f"{request.request_id}: {missing} tokens into {blocks}")
        self.wake()
        return True

    def abort(self, request: SimRequest) -> None:
        """The client has left. A request that loads keeps its blocks until its load is reported,
        or what it is fenced for."""
        if request.is_over:
            return
        self._note("aborts", request.request_id)
        self.awaiting.pop(request.request_id, None)
        self.running.pop(request.request_id, None)
        self.computing.pop(request.request_id, None)
        decision = self._request_finished(request, FinishStatus.ABORTED)
        is_loading = request.request_id in self.loading
        if is_loading and decision.delay_free:
            del self.loading[request.request_id]
            self.fenced.add(request.request_id)
        if decision.delay_free or (request.blocks and not is_loading):
            self.part_with(request, decision)
        self.wake()

    # What time does.

    def wake(self, seconds: float = 0.0) -> None:
        """It will step soon."""
        self._patience = SHORTEST_STEP
        self._step_in(seconds)

    def step(self) -> None:
        if not self.can_act:
            return
        meta = self.scheduler.build_connector_meta()
        now = self.clock()
        if meta:
            self._note("orders", meta)
            for pull in ordered(meta, PullOrder):
                if (reader := self.loading.get(pull.request_id)) is not None:
                    source = pull.source
                    reader.borrows_from = source.address.engine_id, source.request_id
            self.loop.apply(meta, now)
        self.loop.step(now)
        self._look_at_results()
        for request in self.loading.values():
            self._check_patience(request)
        for request in self.awaiting.values():
            waited = self.network.now - (request.awaits_since or 0.0)
            if waited > self.longest_prefill_load:
                self._violate(f"{request.request_id} has waited {waited:.0f} s for a loan")

    def _check_patience(self, request: SimRequest) -> None:
        """A prefill leg computes, or fails, long before a transfer that hangs has ended."""
        is_prefill = not request.kv_transfer_params.get("do_remote_prefill")
        waited = self.network.now - request.loads_since
        if is_prefill and not request.is_over and waited > self.longest_prefill_load:
            self._violate(f"{request.request_id} has waited {waited:.0f} s for the last turn")

    def die(self) -> None:
        """kill -9: nothing it has or owns matters any more, and nothing answers."""
        self._note("dies")
        self.agent.is_alive = False
        self.network.listeners.pop(("sim", self.identity.port), None)
        self.network.died(self.agent)

    def freeze(self, seconds: float) -> None:
        """Neither loop nor scheduler runs; the world goes on."""
        if not self.can_act:
            return
        self._note("freezes", f"for {seconds:.1f} s")
        self.agent.is_frozen = True
        self.network.later(seconds, self.agent.thaw)

    def when_able(self, action: Callable[[], None]) -> None:
        """What reaches a frozen process waits; a dead one's connections are closed."""
        if self.can_act:
            action()
        elif self.is_alive:
            self._waiting.append(action)

    def is_at_rest(self) -> bool:
        return not self.agent.is_alive or (
            len(self.free) == NUM_BLOCKS
            and not (self.loading or self.computing or self.running or self.held)
            and not self.awaiting
            and not self.loop.num_open
        )

    def assert_empty(self) -> None:
        assert sorted(self.free) == list(range(NUM_BLOCKS)), (self.loading, self.held)
        stats = self.stats
        assert (stats.leases_active, stats.pushes_active, stats.pulls_active) == (0, 0, 0)
        assert self.loop.num_open == 0

    def _step_in(self, seconds: float) -> None:
        if self.network.weather.lag:
            (late,) = self.network.dice.roll(f"{self.name} wakes", 1)
            seconds += late * self.network.weather.lag
        at = self.network.now + seconds
        if at < self._next_step:
            self._next_step = at
            self.network.timeline.at(at, self._due, self.name)

    def _thawed(self) -> None:
        self.wake()
        for request in self.loading.values():
            request.loads_since = max(request.loads_since, self.network.now)
        for request in self.awaiting.values():
            request.awaits_since = max(request.awaits_since or 0.0, self.network.now)
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            self.network.later(0.0, partial(self.when_able, action))

    def _due(self) -> None:
        if self.network.now < self._next_step:
            return  # It was due earlier, and has been.
        self._next_step = float("inf")
        if not self.can_act:
            return  # When it thaws it is woken.
        self.step()
        if self.scheduler.has_pending_work():
            self.wake(0.01)
        elif not self.is_at_rest():
            self._step_in(self._patience)
            self._patience = min(self.longest_step, self._patience * 1.5)

    def _look_at_results(self) -> None:
        lag = self.network.weather.lag
        if lag and self.network.dice.roll(f"{self.name} looks", 1)[0] < 0.5:
            return
        results = self.results.take()
        if not results:
            return
        forget = self.network.weather.forget
        if forget and self.network.dice.roll(f"{self.name} forgets", 1)[0] < forget:
            self._lose(results)
            return
        results = self.scheduler.update_connector_output(self.scheduler.recover(results))
        for request_id in sorted(results.finished_sending):
            self._may_go(request_id)
        for request_id in sorted(results.finished_recving):
            self._loaded(request_id, results)

    def _lose(self, results: TransferResults) -> None:
        """Extend the deadline of these reports by `REPORT_SECONDS`."""
        self._note("loses the reports", results)
        until = self.network.now + REPORT_SECONDS * 1.1
        for request in self.loading.values():
            request.loads_since = until
        for request in self.awaiting.values():
            request.awaits_since = until

    def _may_go(self, request_id: str) -> None:
        self._note("finished sending", request_id)
        if request_id in self.reports:
            self._violate(f"{request_id} was reported as sent twice")
        self.reports.add(request_id)
        request = self.held.pop(request_id, None)
        if request is not None and request.is_loan:
            age = self.network.now - request.loads_since
            self.longest_loan = max(self.longest_loan, age)
        if request_id in self.fenced:
            self.outcomes[request_id] = False
        if request is None:
            self._violate(f"{request_id} was reported as sent, and nothing is kept for it")
        else:
            self.give_back(request)

    def _loaded(self, request_id: str, results: TransferResults) -> None:
        ok = request_id not in results.failed_recving
        self._note("finished receiving", f"{request_id}: {'well' if ok else 'badly'}")
        if request_id in self.outcomes:
            self._violate(f"{request_id} was reported as received twice")
        self.outcomes[request_id] = ok
        request = self.loading.pop(request_id, None)
        if request is None:
            self._violate(f"{request_id} was reported as received, and nothing is kept for it")
        elif request.is_over:
            self.give_back(request)
        elif ok:
            self._accept(request)
        else:
            self.fail_load(request)

    def _accept(self, request: SimRequest) -> None:
        loaded = request.prompt_token_ids[: request.num_loading]
        if not self.memory.holds(request.blocks, loaded):
            if request.is_proven:
                self._violate(f"{request.request_id} accepted wrong KV")
            self.memory.fill(request.blocks, loaded)
        self.scheduler.update_state_after_alloc(request, (tuple(request.blocks),), 0)
        self.compute_locally(request, first_token=request.num_loading)
        self.run_request(request)

    def fail_load(self, request: SimRequest) -> None:
        policy = self.scheduler.load_failure_policy(request)
        if policy == "fail":
            self.part_with(request, self._request_finished(request, FinishStatus.ERROR))
            return
        self._check_free(request)
        self.memory.change_owner(request.blocks, f"{request.request_id} (computed)")
        self.compute_locally(request)
        self.run_request(request)

    def compute_locally(self, request: SimRequest, first_token: int = 0) -> None:
        first_block = first_token // BLOCK_SIZE
        self.memory.fill(request.blocks, request.prompt_token_ids, first_block)
        self.memory.remember(request.blocks, request.prompt_token_ids)
        request.num_computed_tokens = request.num_prompt_tokens

    def run_request(self, request: SimRequest) -> None:
        self.running[request.request_id] = request
        if request.computes_for:
            end = partial(self._end, request)
            self.network.later(request.computes_for, partial(self.when_able, end))
        else:
            self._end(request)

    def _end(self, request: SimRequest) -> None:
        """The answer is whole."""
        if request.request_id not in self.running:
            return
        if not self.memory.holds(request.blocks, request.prompt_token_ids):
            self._violate(f"the KV of {request.request_id} changed while it ran")
        del self.running[request.request_id]
        self._answer(request)
        is_prefill = bool(request.kv_transfer_params.get("do_remote_decode"))
        status = FinishStatus.LENGTH_CAPPED if is_prefill else FinishStatus.STOPPED
        request.then(self._finish(request, status))

    def _answer(self, request: SimRequest) -> None:
        """As many tokens as its last block has room for."""
        if request.kv_transfer_params.get("retain"):
            room = -request.num_prompt_tokens % BLOCK_SIZE
            request.answer = [sum(request.prompt_token_ids) % 1000 + i for i in range(room)]
            self.memory.fill(request.blocks, request.token_ids)
            request.num_computed_tokens = len(request.token_ids)

    def _finish(self, request: SimRequest, status: FinishStatus) -> dict[str, Any] | None:
        decision = self._request_finished(request, status)
        self.part_with(request, decision)
        self.wake()
        return decision.kv_transfer_params

    def _request_finished(self, request: SimRequest, status: FinishStatus) -> FinishDecision:
        request.is_over = True
        blocks = (tuple(request.blocks),)
        decision = self.scheduler.request_finished(request, blocks, status)
        if is_older(self.version):
            params = _with_other_proof(decision.kv_transfer_params)
            decision = decision._replace(kv_transfer_params=params)
        request.decision = decision
        return decision

    def part_with(self, request: SimRequest, decision: FinishDecision) -> None:
        """Once it is over: its blocks are free, or are kept for whom the scheduler half knows."""
        if decision.delay_free:
            self._note("keeps", f"{request.blocks} of {request.request_id}")
            self.held[request.request_id] = request
        else:
            self.give_back(request)

    def give_back(self, request: SimRequest) -> None:
        self._check_free(request)
        self._note("frees", f"{request.blocks} of {request.request_id}")
        (self.memory.unpin if request.is_loan else self.memory.give_back)(request.blocks)
        request.blocks = []

    def _check_free(self, request: SimRequest) -> None:
        for block in request.blocks:
            transfer = self.network.touching(self.agent, block)
            if transfer is not None:
                self._violate(f"block {block} was given back while {transfer} may touch it")
        self.may_free(self, request)

    def _begins(self, transfer: SimTransfer) -> None:
        owner = self.memory.owner[transfer.local[0]] or ""
        if transfer.kind == "READ" and owner in self.loading:
            self.loading[owner].reads.append(transfer)

    def _unix_time(self) -> float:
        return 1.7e9 + self.network.now

    def _note(self, what: str, details: object = "") -> None:
        self.network.note(self.agent.name, what, details)

    def _violate(self, what: str) -> None:
        self.network.violate(self.agent.name, what)

    # How others see it, and it them.

    def dial(self, peer: PeerRank) -> PendingHandshake:
        self.network.later(self.network.weather.handshake, self.wake)
        return self.network.dial(peer, self.version)

    def close(self) -> None:
        """As a dialer."""

    def new_scheduler(self) -> SchedulerConnector:
        return SchedulerConnector(
            self.config, self.identity, GEOMETRY, self._unix_time, clock=self.shown
        )

    def _new_loop(self) -> TransferLoop:
        context = WorkerContext(
            agent=self.agent,
            config=self.config,
            geometry=GEOMETRY,
            identity=self.identity,
            regions=REGIONS,
            clock=self.clock,
            results=self.results,
            stats=self.stats,
            dialer=self,
        )
        blocks = SimBlocks(self.memory)
        return TransferLoop(context, open_push=push_of(self.config), blocks=blocks)


def _with_other_proof(params: Any) -> Any:
    """As an older engine reads and writes them: what it finds readable, others do not."""
    proof = params and params.get("prefix_proof")
    if not proof:
        return params
    version = {VERSION: OLDER_PROOF, OLDER_PROOF: VERSION}[proof["v"]]
    return {**params, "prefix_proof": {**proof, "v": version}}


def handshake_payload(
    agent: SimAgent,
    engine_id: str,
    version: int | None,
    lease_extension: float = 0.0,
    write_bound: float = 0.0,
    returns_blocks: bool = True,
) -> bytes:
    metadata = AgentMetadata(
        engine_id=engine_id,
        agent_metadata=agent.metadata(),
        kv_caches_base_addr=[region.base_addr for region in REGIONS],
        device_id=0,
        num_blocks=NUM_BLOCKS,
        block_lens=[region.block_len for region in REGIONS],
        block_strides=[region.block_stride for region in REGIONS],
        kv_cache_layout=GEOMETRY.kv_cache_layout,
        block_size=BLOCK_SIZE,
        attn_backend_name=GEOMETRY.attn_backend_name,
        region_names=[region.name for region in REGIONS],
        disagg_ext=version,
        lease_extension=lease_extension,
        write_bound=write_bound,
        returns_blocks=version is not None and returns_blocks,
    )
    return encode_payload(metadata, FACTORS)


def has_landed(request: SimRequest) -> bool:
    """All that was to be read for it is here."""
    return bool(request.reads) and all(read.state is TransferState.DONE for read in request.reads)


def new_name(network: Network, engine: str) -> str:
    """An agent's name is never used again."""
    lives = sum(name.partition("#")[0] == engine for name in network.agents)
    return f"{engine}#{lives + 1}" if lives else engine
