import math
from typing import Any

import pytest

from engine_ext.common.config import ConnectorConfig

BASE: dict[str, Any] = {"kv_connector": "DisaggConnector", "kv_role": "kv_both"}


def with_extra(**extra: Any) -> ConnectorConfig:
    return ConnectorConfig.from_kv_transfer_config({**BASE, "kv_connector_extra_config": extra})


def test_defaults_are_those_of_the_lease_design() -> None:
    config = ConnectorConfig.from_kv_transfer_config(BASE)
    assert (config.lease_duration, config.heartbeat_interval, config.lease_extension) == (30, 5, 20)
    assert config.load_failure_policy == "fail"
    assert config.engine_id


def test_two_engines_without_a_given_id_differ() -> None:
    first, second = (ConnectorConfig.from_kv_transfer_config(BASE) for _ in range(2))
    assert first.engine_id != second.engine_id


@pytest.mark.parametrize("duration", [0.5, 1, 2, 5, 6, 7, 30])
def test_a_short_lease_still_beats_and_extends(duration: float) -> None:
    config = with_extra(kv_lease_duration=duration)
    assert 0 < config.heartbeat_interval < config.lease_extension < duration


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        ([], "not a JSON object"),
        ({"kv_role": "kv_both"}, "kv_connector is missing"),
        ({**BASE, "kv_connector": "LMCacheConnector"}, "LMCacheConnector"),
        ({**BASE, "kv_role": "both"}, "kv_role"),
        ({**BASE, "kv_load_failure_policy": "ignore"}, "kv_load_failure_policy"),
        ({**BASE, "engine_id": 5}, "engine_id"),
        ({**BASE, "kv_connector_extra_config": []}, "kv_connector_extra_config"),
        ({**BASE, "kv_connector_extra_config": {"kv_lease_duration": 0}}, "kv_lease_duration"),
        ({**BASE, "kv_connector_extra_config": {"kv_lease_duration": "30"}}, "kv_lease_duration"),
        *(
            ({**BASE, "kv_connector_extra_config": {key: value}}, key)
            for key in ("kv_lease_duration", "push_write_bound", "engine_ttl", "num_threads")
            for value in (10**400, 2e6, math.nan, math.inf, 1e-300, True)
        ),
        ({**BASE, "kv_connector_extra_config": {"backends": "UCX"}}, "backends"),
        ({**BASE, "kv_connector_extra_config": {"num_threads": -1}}, "num_threads"),
        ({**BASE, "kv_connector_extra_config": {"bidirectional_kv_xfer": 1}}, "bidirectional"),
        ({**BASE, "kv_connector_extra_config": {"retained_blocks_share": 2}}, "retained_blocks"),
        ({**BASE, "enable_permute_local_kv": 2}, "enable_permute_local_kv"),
    ],
)
def test_a_bad_value_is_refused_in_one_line_that_names_it(raw: Any, word: str) -> None:
    with pytest.raises(ValueError, match=word) as caught:
        ConnectorConfig.from_kv_transfer_config(raw)
    assert "\n" not in str(caught.value)


def test_an_unknown_key_is_a_warning_that_names_the_nearest_known(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with_extra(kv_lease_duraton=30)
    assert "did you mean kv_lease_duration?" in caplog.text
