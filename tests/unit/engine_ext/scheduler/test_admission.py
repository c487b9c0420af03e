from typing import Any

import pytest

from engine_ext.scheduler.admission import hands_back, judge, parse_threshold


@pytest.mark.parametrize(
    ("threshold", "local", "external", "refused"),
    [
        (0.0, 0, 0, False),
        (0.5, 49, 0, True),
        (0.5, 50, 0, False),
        (0.5, 20, 30, False),
        (1.0, 99, 0, True),
        (1.0, 50, 50, False),
        (1.0, 96, 96, False),
    ],
)
def test_a_request_is_refused_below_its_threshold_and_not_at_it(
    threshold: float, local: int, external: int, refused: bool
) -> None:
    verdict = judge(threshold, local, external, 100, prefills=False)
    assert verdict.is_refused is refused


def test_a_prefill_leg_is_never_refused() -> None:
    assert not judge(1.0, 0, 0, 100, prefills=True).is_refused


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), float("inf"), "0.5", True, [], {}])
def test_what_is_no_threshold_is_an_error(value: Any) -> None:
    with pytest.raises(ValueError, match="cache_hit_threshold"):
        parse_threshold(value)


@pytest.mark.parametrize(("value", "threshold"), [(None, None), (0, 0.0), (1, 1.0), (0.25, 0.25)])
def test_thresholds_are_read(value: Any, threshold: float | None) -> None:
    assert parse_threshold(value) == threshold


@pytest.mark.parametrize(
    ("params", "default", "is_back"),
    [
        (None, False, False),
        (None, True, True),
        ({"hand_back": True}, False, True),
        ({"hand_back": False}, True, False),
        ({"hand_back": 1}, False, False),
        ([], True, True),
        ({"hand_back": True, "do_remote_decode": True}, True, False),
        ({"hand_back": True, "do_remote_prefill": True}, False, True),
    ],
)
def test_who_is_ended_rather_than_preempted(params: Any, default: bool, is_back: bool) -> None:
    assert hands_back(params, default) is is_back
