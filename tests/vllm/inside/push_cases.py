"""Pushes that give their blocks back to other requests, in vLLM's own bookkeeping."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from vllm.v1.request import RequestStatus

from engine_ext.common.orders import ConfirmReturn, PushInquiry, PushRegistration, Reclaim
from tests.vllm.inside.in_process import BLOCK, NUM_BLOCKS, Engine

OURS = "engine_ext.vllm.scheduler.DisaggScheduler"
PARKED = RequestStatus.WAITING_FOR_REMOTE_KVS
HALF = NUM_BLOCKS // 2 * BLOCK
"""Tokens: two prompts of so many do not fit, for vLLM keeps a block for itself."""


class Decoder(Engine):
    """In push mode."""

    def ask(self, name: str) -> Any:
        where = {"remote_engine_id": "p", "remote_host": "h", "remote_port": 1}
        params = {"do_remote_prefill": True, "remote_request_id": name, **where}
        return self.add(name, HALF - 2, params)

    def ordered(self, kind: type[Any]) -> set[str]:
        """By every rank."""
        orders = [
            {order.request_id for meta in rank.applied for order in meta.all(kind)}
            for rank in self.ranks
        ]
        return set.intersection(*orders)

    def report(self, what: str, name: str, **options: Any) -> None:
        """Ranks report in one step after the other."""
        for rank in self.ranks:
            getattr(rank.half.results, what)(name, **options)
            self.step()


def a_push_that_is_given_back_makes_room_and_is_loaded_later(
    policy: str, num_ranks: int, model: Path
) -> None:
    engine = Decoder(model, policy, OURS, num_ranks, connector="DisaggPushConnector")
    early = engine.ask("early")
    engine.step_until(lambda: engine.ordered(PushRegistration) == {"early"})
    assert early.status is PARKED
    ready = engine.ask("ready")
    engine.step_until(lambda: engine.ordered(PushInquiry) == {"ready"})
    assert not engine.ordered(Reclaim)
    engine.report("ready", "ready")
    engine.step_until(lambda: engine.ordered(Reclaim) == {"early"})
    engine.report("returned", "early")
    engine.step_until(lambda: engine.ordered(ConfirmReturn) == {"early"})
    engine.report("received", "early", ok=False)
    engine.step_until(lambda: engine.ordered(PushRegistration) == {"early", "ready"})
    assert ready.status is PARKED
    engine.step_until(lambda: engine.ordered(PushInquiry) == {"early", "ready"})
    assert (early.status, early.num_computed_tokens) == (RequestStatus.WAITING, 0)
    engine.report("received", "ready", ok=True)
    engine.run("ready")
    engine.report("ready", "early")
    engine.read_all()
    engine.step_until(lambda: early.status is PARKED)
    engine.report("received", "early", ok=True)
    assert engine.run("early").reason == "length"
    for _ in range(3):
        engine.step()
        engine.read_all()
    engine.step()
    assert engine.is_empty()


def an_engine_rests_while_all_that_waits_is_for_others_to_do(model: Path) -> None:
    engine = Decoder(model, "fail", OURS, connector="DisaggPushConnector")
    engine.scheduler.set_wake(lambda: None)
    engine.ask("early")
    engine.ask("short")
    for _ in range(4):
        engine.step()
    assert engine.ordered(PushInquiry) == {"short"}
    assert engine.scheduler.awaits_kv_alone()
    engine.ranks[0].half.results.ready("short")
    engine.step()
    assert not engine.scheduler.awaits_kv_alone()


def vllms_own_scheduler_class_registers_early_only_beside_the_longest_request(
    policy: str, model: Path
) -> None:
    """Which is nearly as long as the cache here."""
    engine = Decoder(model, policy, None, connector="DisaggPushConnector")
    engine.ask("first")
    for _ in range(3):
        engine.step()
    assert not engine.ordered(PushRegistration)
    assert engine.ordered(PushInquiry) == {"first"}
    engine.report("ready", "first")
    engine.step_until(lambda: engine.ordered(PushRegistration) == {"first"})
    engine.report("received", "first", ok=True)
    assert engine.run("first").reason == "length"


def cases() -> Iterator[tuple[str, Callable[[Path], None]]]:
    for policy in ("fail", "recompute"):
        for num_ranks in (1, 2):
            back = a_push_that_is_given_back_makes_room_and_is_loaded_later
            yield f"{back.__name__}, {policy}, {num_ranks} ranks", partial(back, policy, num_ranks)
        own = vllms_own_scheduler_class_registers_early_only_beside_the_longest_request
        yield f"{own.__name__}, {policy}", partial(own, policy)
    rests = an_engine_rests_while_all_that_waits_is_for_others_to_do
    yield rests.__name__, rests
