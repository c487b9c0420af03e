"""The picture: what several processes see together, and what of it has changed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.views import FleetView
from router.ui.engine_reports import EngineGauge, EnginePoller, parse_metrics
from router.ui.live_requests import Refusals
from router.ui.snapshot import KEYED, Json, ProcessSnapshot, changes, merge_snapshots
from router.ui.standing_checks import CheckResult, CheckState
from scripts.mock_engine import MockEngine
from tests.unit.router.fleet.test_views import group, seen
from tests.unit.router.harness import Router, eventually


def one(in_flight: int = 1, entries: int | None = None) -> ProcessSnapshot:
    return ProcessSnapshot(
        view=FleetView(engines=[seen(in_flight=in_flight)], groups=[], has_all_listings=True),
        links=[(("p", "d", "prompt"), 0.5)],
        running=[],
        ended=[],
        missed=0,
        in_flight=1,
        queue=(2, 8),
        ready={"blocking": {}, "degrading": {}},
        refusals=[Refusals(status=503, text="queue full", count=3)],
        checks=[CheckResult(name="KV transfer", state=CheckState.OK, text="4 engines compared")],
        outcomes={"ok": 2},
        turns={"hit": 1},
        kept={},
        entries=entries,
    )


def test_counts_of_processes_add_up() -> None:
    told = merge_snapshots([one(2, 5), one(3, 6), None], {"a:1": EngineGauge(kv_usage=0.5)})
    assert told["engines"]["a:1"]["in_flight"] == 5
    assert told["engines"]["a:1"]["gauge"]["kv_usage"] == 0.5
    assert told["ways"]["p d prompt"] == {
        "from": "p",
        "to": "d",
        "kind": "prompt",
        "rate": 1.0,
        "bytes_per_second": None,
        "slow": "",
    }
    queue = {"depth": 4, "size": 16}
    assert told["totals"] == {"requests": 4, "in_flight": 2, "queue": queue, "by": {"ok": 4}}
    assert told["refusals"] == [{"status": 503, "text": "queue full", "count": 6}]
    assert told["turns"] == {"outcomes": {"hit": 2}, "kept": {}, "entries": 11}
    assert told["workers"] == {"answered": 2, "known": 3}


def test_links_of_slow_pairs_are_marked_with_or_without_traffic() -> None:
    seen, text = one(), "p -> d moves KV at 1.2 GB/s, its neighbours at 40 GB/s"
    seen.slow = [(("p", "d"), text), (("p", "d2"), "p -> d2 moves KV slowly")]
    ways = merge_snapshots([one(), seen], {}, {("d", "p", "turn"): 9.0})["ways"]
    slow = {name: way["slow"] for name, way in ways.items()}
    assert slow == {"p d prompt": text, "d p turn": "", "p d2 prompt": "p -> d2 moves KV slowly"}
    assert ways["p d2 prompt"]["rate"] == 0


def test_needed_engines_of_all_processes_add_up() -> None:
    snapshots = [one(), one()]
    for each, number in zip(snapshots, (0.72, 0.61), strict=True):
        each.view.groups.append(group(1, 1))
        each.needed = {"blue": {"prefill": number}, "green": {"decode": 1.0}}
    groups = merge_snapshots([*snapshots, None], {})["groups"]
    assert groups["blue"]["needed"] == {"prefill": 1.33}


def test_bytes_are_told_of_ways_that_others_requests_took_too() -> None:
    speeds = {("p", "d", "prompt"): 5.0, ("d", "p", "turn"): 7.0}
    ways = merge_snapshots([one()], {}, speeds)["ways"]
    assert ways["p d prompt"]["bytes_per_second"] == 5.0
    assert (ways["d p turn"]["rate"], ways["d p turn"]["bytes_per_second"]) == (0, 7.0)


def test_only_what_is_different_is_told() -> None:
    before = merge_snapshots([one()], {})
    assert changes(before, merge_snapshots([one()], {})) == {}
    after = merge_snapshots([one(9)], {})
    assert list(changes(before, after)) == ["engines"]
    after["engines"] = {}
    assert changes(before, after) == {"engines": {"a:1": None}}


ITEMS = st.dictionaries(st.sampled_from("abc"), st.integers(0, 2))


@given(
    st.fixed_dictionaries(dict.fromkeys((*KEYED, "totals"), ITEMS)),
    st.fixed_dictionaries(dict.fromkeys((*KEYED, "totals"), ITEMS)),
)
def test_who_had_the_one_and_hears_the_changes_has_the_other(before: Json, after: Json) -> None:
    has = {name: dict(items) for name, items in before.items()}
    for name, items in changes(before, after).items():
        if name in KEYED:
            has[name].update(items)
            has[name] = {key: item for key, item in has[name].items() if item is not None}
        else:
            has[name] = items
    assert has == after


@pytest.mark.parametrize(
    ("metrics", "usage", "waiting"),
    [
        (b'vllm:kv_cache_usage_perc{engine="0",model_name="a}b"} 0.25\n', 0.25, None),
        (b"vllm:kv_cache_usage_perc 0.25\nvllm:kv_cache_usage_perc{e='1'} 0.5\n", 0.5, None),
        (b"disagg_engine_blocks 10.0\ndisagg_engine_blocks_free 4.0\n", 0.6, None),
        (b"vllm:num_requests_waiting 3.0\nvllm:num_requests_waiting_x 9\n", None, 3),
        (b"vllm:kv_cache_usage_perc nan\nvllm:kv_cache_usage_perc 1e+--\n", None, None),
        (b"vllm:kv_cache_usage_perc 77\n", 1.0, None),
        (b"disagg_engine_blocks 0\ndisagg_engine_blocks_free 4.0\n", None, None),
    ],
)
def test_what_metrics_say(metrics: bytes, usage: float | None, waiting: int | None) -> None:
    gauge, _ = parse_metrics(metrics)
    assert (gauge.kv_usage, gauge.waiting) == (usage, waiting)


@given(st.binary() | st.text().map(lambda text: b"vllm:kv_cache_usage_perc " + text.encode()))
def test_no_metrics_break_it(metrics: bytes) -> None:
    parse_metrics(metrics)


async def test_whatever_an_engine_answers_it_is_no_less_healthy(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    p.pages = {"/metrics": b"\xff\x00" * 50_000, "/disagg/leases": b"[" * 9000}
    d.pages = {"/metrics": b"vllm:kv_cache_usage_perc 0.5\n"}
    router.engine(p).capabilities.lists_capabilities = True
    engines = EnginePoller(router.gateway.fleet, lambda: 0.0)
    await engines.poll_all()
    assert engines.gauges()[router.engine(d).name].kv_usage == 0.5
    assert engines.gauges()[router.engine(p).name] == EngineGauge()
    d.is_mute = True
    await engines.poll_all()
    assert router.engine(p).failed_probes == 0
    assert router.engine(p).health == "healthy"


async def test_a_speed_is_known_at_the_second_answer_and_forgotten_with_silence(
    router: Router, d: MockEngine
) -> None:
    name, at = router.engine(d).name, 0.0
    engines = EnginePoller(router.gateway.fleet, lambda: at)
    for moment, moved, speed in ((0.0, 1000, None), (2.0, 4000, 1500.0), (3.0, 0, 0.0)):
        at = moment
        d.pages = {"/metrics": b"vllm:nixl_bytes_transferred_sum %d\n" % moved}
        await engines.poll_all()
        assert engines.gauges()[name].bytes_per_second == speed
    at = 99.0
    assert name not in engines.gauges()
    await eventually(lambda: router.engine(d).health == "healthy")
