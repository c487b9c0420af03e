"""Which engines can exchange KV, and the first fact in which two of them differ."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.engine import BOTH, DECODE, DEFAULT_GROUP, PREFILL, EngineRole
from router.fleet.kv_facts import MAX_FACTORS, MAX_TEXT, KvFacts, find_kv_difference, parse_kv_facts
from router.fleet.partners import MAX_KINDS, EngineFacts, FindingKind, compare_engines

FACTORS = {"architecture": "Qwen3ForCausalLM", "dtype": "bfloat16", "num_layers": "28"}
RANK = {"dp_rank": 0, "block_size": 16, "tp_size": 1, "compatibility_hash": "aa11"}
NO_CONNECTOR_PAGE: dict[str, Any] = {"capabilities": [], "transfer_modes": [], "ranks": []}


def page(factors: dict[str, str] | None = None, **changes: Any) -> dict[str, Any]:
    """An identity page; other factors have another hash."""
    rank = RANK | {"compatibility_factors": FACTORS | (factors or {})}
    if factors:
        rank["compatibility_hash"] = "bb22"
    of_rank = {name: changes.pop(name) for name in list(changes) if name in RANK}
    usual = {"transfer_modes": ["pull"], "versions": {"extension": "2"}, "lease_seconds": 30.0}
    return usual | {"side_channel_secret": "none"} | changes | {"ranks": [rank | of_rank]}


def configured(digest: str) -> dict[str, Any]:
    """An identity page with the digest of a configuration, which the hash does not cover."""
    return page({"configuration": digest}, compatibility_hash="aa11")


def facts_of(name: str, role: EngineRole, found: object = None, **changes: Any) -> EngineFacts:
    kv = KvFacts() if found is None else parse_kv_facts(found)
    usual: dict[str, Any] = {"source_group": DEFAULT_GROUP, "group": DEFAULT_GROUP, "models": None}
    return EngineFacts(name=name, role=role, kv=kv, **(usual | changes))


@pytest.mark.parametrize(
    ("p", "d", "text"),
    [
        (page(), page({"num_layers": "36"}), "num_layers 28 and 36"),
        (page({"dtype": "float16", "num_layers": "36"}), page(), "dtype float16 and bfloat16"),
        (page(), page({"state": "float32"}), "state not set and float32"),
        (configured("c1"), configured("c2"), "configuration c1 and c2"),
        (page(), page(compatibility_hash="cc33"), "compatibility hash aa11 and cc33"),
        (page(), page(transfer_modes=["push"]), "transfer modes pull and push"),
        (page(), page(versions={"extension": "3"}), "protocol extension 2 and 3"),
        (page(tp_size=2), page(tp_size=3), "tp_size 2 and 3"),
        (
            page(side_channel_secret="required"),
            page(),
            "side_channel_secret_file missing at the decode engine",
        ),
        (page(), NO_CONNECTOR_PAGE, "started without --kv-transfer-config"),
        (NO_CONNECTOR_PAGE, page(), "started without --kv-transfer-config"),
    ],
)
def test_first_fact_that_differs_is_named(p: Any, d: Any, text: str) -> None:
    found = find_kv_difference(parse_kv_facts(p), parse_kv_facts(d))
    assert found is not None
    assert found.text == text
    assert found.cure


@pytest.mark.parametrize(
    ("p", "d"),
    [
        (page(), page()),
        (page(), page(block_size=24, tp_size=4)),
        (page(), page(transfer_modes=["push", "pull"])),
        (page(side_channel_secret="mixed"), page()),
        (page(side_channel_secret="mixed"), page(side_channel_secret="required")),
        (page(), page(versions={})),
        (page(), configured("c1")),
        (page(), None),
        (None, NO_CONNECTOR_PAGE),
        (page(), {"capabilities": ["prefix_proof"]}),
        (page({"x": "1"}, compatibility_hash="aa11"), page()),
    ],
)
def test_engines_fit_if_nothing_is_known_to_stop_them(p: object, d: object) -> None:
    assert find_kv_difference(parse_kv_facts(p), parse_kv_facts(d)) is None


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "ranks": ANYTHING
            | st.lists(
                st.fixed_dictionaries(
                    {},
                    optional={
                        "compatibility_factors": ANYTHING,
                        "compatibility_hash": ANYTHING,
                        "block_size": ANYTHING,
                        "tp_size": ANYTHING,
                    },
                ),
                max_size=2,
            ),
            "transfer_modes": ANYTHING,
            "versions": ANYTHING,
            "side_channel_secret": ANYTHING,
            "lease_seconds": ANYTHING,
        },
    ),
    ANYTHING,
)
def test_any_page_can_be_read_and_compared(one: object, other: object) -> None:
    facts = [parse_kv_facts(one), parse_kv_facts(other), parse_kv_facts(page())]
    hash(tuple(facts))
    for p in facts:
        for d in facts:
            find_kv_difference(p, d)


def test_what_is_kept_of_a_page_is_bounded_and_of_one_line() -> None:
    found = parse_kv_facts(page({f"{n}\n": "x" * 9999 for n in range(999)}))
    assert len(found.factors) <= MAX_FACTORS
    assert all(len(t) <= MAX_TEXT and "\n" not in t for pair in found.factors for t in pair)


def test_engines_that_differ_have_no_partner_and_one_finding() -> None:
    report = compare_engines(
        [
            facts_of("p:1", PREFILL, page()),
            facts_of("d:1", DECODE, page({"num_layers": "36"})),
            facts_of("d:2", DECODE, page({"num_layers": "36"})),
        ]
    )
    (finding,) = report.findings
    assert finding.kind is FindingKind.NO_PARTNER
    assert finding.text == (
        "prefill engine p:1 and decode engines d:1, d:2 cannot exchange KV, because they differ: "
        "num_layers 28 and 36"
    )
    reason = "engines differ: num_layers 28 and 36"
    assert report.reasons == {"p:1": reason, "d:1": reason, "d:2": reason}


def test_engine_with_any_partner_is_not_degraded() -> None:
    report = compare_engines(
        [
            facts_of("p:1", PREFILL, page()),
            facts_of("d:1", DECODE, page()),
            facts_of("d:2", DECODE, page({"dtype": "float16"})),
        ]
    )
    assert report.reasons == {"d:2": "engines differ: dtype bfloat16 and float16"}
    assert "d:1" not in report.findings[0].text


def test_decode_engine_without_connector_is_named_at_both_ends() -> None:
    report = compare_engines(
        [facts_of("p:1", PREFILL, page()), facts_of("d:1", DECODE, NO_CONNECTOR_PAGE)]
    )
    (finding,) = report.findings
    assert finding.text == (
        "decode engine d:1 was started without --kv-transfer-config, so no KV moves"
    )
    assert report.reasons == {
        "p:1": "d:1 was started without --kv-transfer-config",
        "d:1": "started without --kv-transfer-config",
    }


def test_engines_of_other_models_are_no_partners() -> None:
    m, n = frozenset({"m"}), frozenset({"n"})
    report = compare_engines(
        [
            facts_of("p:1", PREFILL, models=m),
            facts_of("d:1", DECODE, models=n),
            facts_of("p:2", PREFILL, models=m | n, source_group="blue"),
        ]
    )
    assert report.reasons == {
        "p:1": "engines differ: models m and n",
        "d:1": "engines differ: models m and n",
        "p:2": "engines differ: groups blue and default",
    }


def test_stock_engine_outside_of_all_groups_is_explained() -> None:
    report = compare_engines(
        [
            facts_of("p:1", PREFILL, group="default-aa11"),
            facts_of("d:1", DECODE, group=DEFAULT_GROUP),
        ]
    )
    assert "groups default-aa11 and default" in report.findings[0].text


@pytest.mark.parametrize("role", [PREFILL, DECODE, BOTH])
def test_role_without_engines_and_lone_engine_are_no_finding(role: EngineRole) -> None:
    assert compare_engines([facts_of("e:1", role, page())]) == compare_engines([])
    assert not compare_engines([facts_of("e:1", role, NO_CONNECTOR_PAGE)]).findings


def test_two_engines_of_both_roles_are_partners() -> None:
    pair = [facts_of("e:1", BOTH, page()), facts_of("e:2", BOTH, page())]
    assert not compare_engines(pair).reasons
    differing = [facts_of("e:1", BOTH, page()), facts_of("e:2", BOTH, page({"dtype": "x"}))]
    assert set(compare_engines(differing).reasons) == {"e:1", "e:2"}


def test_engine_of_both_roles_may_be_alone_in_the_group_that_its_source_names() -> None:
    green = [facts_of(f"e:{n}", BOTH, page(), source_group="green") for n in (1, 2)]
    alone = facts_of("e:3", BOTH, page(), source_group="blue")
    assert not compare_engines([*green, alone]).findings
    half = facts_of("p:1", PREFILL, page(), source_group="red")
    assert compare_engines([*green, alone, half]).reasons.keys() == {"p:1"}


def test_leases_that_differ_are_a_note() -> None:
    report = compare_engines(
        [facts_of("p:1", PREFILL, page()), facts_of("d:1", DECODE, page(lease_seconds=600))]
    )
    (finding,) = report.findings
    assert (finding.kind, finding.is_degraded) == (FindingKind.LEASES_DIFFER, False)
    assert "30 s" in finding.text
    assert "600 s" in finding.text
    assert not report.reasons


def test_shared_engine_id_is_a_finding_for_each_pair() -> None:
    pair = [facts_of("p:1", PREFILL, page()), facts_of("d:1", DECODE, page())]
    report = compare_engines(pair, {"p:1": ("d:1", "e"), "d:1": ("p:1", "e")})
    (finding,) = report.findings
    assert finding.kind is FindingKind.SHARED_ID
    assert report.reasons["d:1"] == "engine_id e is also that of p:1"


def test_large_fleet_of_two_kinds_is_two_engines() -> None:
    engines = [facts_of(f"p:{n}", PREFILL, page()) for n in range(500)]
    engines += [facts_of(f"d:{n}", DECODE, page({"dtype": "x"})) for n in range(500)]
    report = compare_engines(engines)
    assert len(report.findings) == 1
    assert len(report.findings[0].text) < 300
    assert len(report.reasons) == 1000


def test_more_kinds_than_are_compared_count_as_fitting() -> None:
    engines = [facts_of("p:1", PREFILL, page())]
    engines += [facts_of(f"d:{n}", DECODE, page({"dtype": str(n)})) for n in range(MAX_KINDS + 1)]
    assert not compare_engines(engines).findings
