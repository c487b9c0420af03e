"""Log lines that somebody else can provoke."""

import logging

from engine_ext.common.log_rate_limit import MAX_KINDS, LogRateLimit


def line(at: float, text: str = "peer %s fell over", *args: object) -> logging.LogRecord:
    record = logging.LogRecord("x", logging.WARNING, "x.py", 1, text, args or ("p",), None)
    record.created = at
    return record


def test_of_a_flood_the_first_lines_are_logged_and_the_next_minute_says_how_many_were_not() -> None:
    seldom = LogRateLimit(limit=3, seconds=60)
    assert [seldom.filter(line(1000 + second)) for second in range(10)] == [True] * 3 + [False] * 7
    later = line(1060)
    assert seldom.filter(later)
    assert later.getMessage() == "peer p fell over (and 7 more like this since)"
    assert seldom.filter(quiet := line(1200))
    assert quiet.getMessage() == "peer p fell over"


def test_one_kind_of_line_holds_back_no_other_and_the_kinds_are_bounded() -> None:
    seldom = LogRateLimit(limit=1, seconds=60)
    assert seldom.filter(line(1000))
    assert not seldom.filter(line(1000))
    assert seldom.filter(line(1000, "something else of %s"))
    assert all(seldom.filter(line(1001, f"{number} %s")) for number in range(2 * MAX_KINDS))
    assert seldom.filter(line(1001)), "the oldest kind is forgotten"
