"""Several processes' views as one."""

from typing import Any

import pytest

from router.fleet.engine import CircuitState, EngineRole, Health, Intent
from router.fleet.views import (
    EngineView,
    FleetView,
    GroupView,
    has_all_listings,
    merge_engine_views,
    merge_group_views,
)


def seen(**fields: Any) -> EngineView:
    usual: dict[str, Any] = {
        "name": "a:1",
        "url": "http://a:1",
        "role": EngineRole.DECODE,
        "group": "default",
        "models": None,
        "weight": 1.0,
        "health": Health.HEALTHY,
        "reason": "",
        "intent": Intent.DRAINING,
        "cold": False,
        "in_flight": 0,
        "tokens_in_flight": 0,
        "holding": 0,
        "circuit": CircuitState.CLOSED,
        "sources": ["file"],
        "drained": True,
    }
    return EngineView(**(usual | fields))


def view(
    *engines: EngineView, groups: tuple[GroupView, ...] = (), informed: bool = True
) -> FleetView:
    return FleetView(engines=list(engines), groups=list(groups), has_all_listings=informed)


def group(prefillers: int, decoders: int, weight: float = 1.0) -> GroupView:
    return GroupView(
        name="blue",
        weight=weight,
        weighed_by="engines",
        prefillers=prefillers,
        decoders=decoders,
        complete=bool(prefillers and decoders),
    )


def test_counts_add_up_and_the_worst_state_counts() -> None:
    one = seen(in_flight=2, tokens_in_flight=10, holding=1, drained=False, sources=["file", "dns"])
    other = seen(
        in_flight=1,
        health=Health.UNHEALTHY,
        reason="dead",
        circuit=CircuitState.HALF_OPEN,
        cold=True,
        sources=["dns", "admin"],
    )
    [both] = merge_engine_views([view(one), view(other)])
    assert (both.in_flight, both.tokens_in_flight, both.holding) == (3, 10, 1)
    assert (both.health, both.reason) == (Health.UNHEALTHY, "dead")
    assert (both.circuit, both.cold) == (CircuitState.HALF_OPEN, True)
    assert both.sources == ["file", "dns", "admin"]


def test_where_processes_prefer_different_roles_the_engine_has_both() -> None:
    prompts = seen(role="both", preferred_role="prefill", role_reason="prompts need 2 engines")
    answers = seen(role="both", preferred_role="decode", role_reason="prompts need 1 engine")
    [one] = merge_engine_views([view(prompts), view(prompts), view(seen(role="both"))])
    assert (one.preferred_role, one.role_reason) == ("prefill", "prompts need 2 engines")
    [one] = merge_engine_views([view(prompts), view(answers)])
    assert one.preferred_role == "both"
    assert one.role_reason == (
        "prefill in a worker process: prompts need 2 engines; "
        "decode in a worker process: prompts need 1 engine"
    )
    [one] = merge_engine_views([view(seen(role="both")), view(seen(role="both"))])
    assert (one.preferred_role, one.role_reason) == (None, "")


def test_an_engine_is_drained_only_if_all_processes_say_so() -> None:
    [both] = merge_engine_views([view(seen()), view(seen())])
    assert (both.drained, both.intent) == (True, Intent.DRAINING)
    [both] = merge_engine_views([view(seen()), view(seen(intent=Intent.SERVING, drained=False))])
    assert (both.drained, both.intent) == (False, Intent.SERVING)
    [both] = merge_engine_views([view(seen()), view(seen(holding=1, drained=False))])
    assert not both.drained
    [one] = merge_engine_views([view(seen()), view()])
    assert one.drained, "a process that does not know it needs nothing of it"


def test_no_engine_is_drained_while_a_process_does_not_answer() -> None:
    [one] = merge_engine_views([view(seen()), None])
    assert not one.drained
    assert not has_all_listings([view(), None])
    assert not has_all_listings([view(), view(informed=False)])
    assert has_all_listings([view(), view()])


@pytest.mark.parametrize("views", [[], [None], [None, None]])
def test_without_any_view_there_are_no_engines(views: list[FleetView | None]) -> None:
    assert not merge_engine_views(views)
    assert not merge_group_views(views)


def test_the_worst_view_of_a_group_counts() -> None:
    [blue] = merge_group_views(
        [view(groups=(group(2, 1),)), view(groups=(group(1, 0, 3.0),)), None]
    )
    assert (blue.prefillers, blue.decoders, blue.complete, blue.weight) == (1, 0, False, 3.0)
