import pytest

from engine_ext.common.states import IllegalEventError, after

LIFE = {("egg", "hatch"): "bird"}


def test_an_event_leads_to_the_state_in_the_table_and_any_other_is_an_error() -> None:
    assert after(LIFE, "egg", "hatch") == "bird"
    for state, event in (("bird", "hatch"), ("egg", "fly")):
        with pytest.raises(IllegalEventError, match=f"{event} in {state}"):
            after(LIFE, state, event)
