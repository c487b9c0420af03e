"""The few lines that matter of a large page of metrics."""

import pytest

from router.fleet.metrics_page import MAX_METRIC_LINE_BYTES, MAX_METRIC_LINES, find_lines

NAMES = (b"blocks", b"blocks_free")


@pytest.mark.parametrize(
    ("page", "lines"),
    [
        (b"", b""),
        (b"blocks 1", b"blocks 1\n"),
        (b"blocks 1\nblocks_free 2\n", b"blocks 1\nblocks_free 2\n"),
        (b"a 1\nblocks{a} 1\nblocks{b} 2\n", b"blocks{a} 1\nblocks{b} 2\n"),
        (b"# HELP blocks\nmy_blocks 1\nblocks_total 2\n blocks 3\n", b""),
        (b"blocks %b\nblocks 1\n" % (b"1" * MAX_METRIC_LINE_BYTES), b"blocks 1\n"),
        (b"blocks\nblocks\n", b""),
    ],
)  # fmt: skip
def test_only_lines_of_these_metrics_are_found(page: bytes, lines: bytes) -> None:
    assert find_lines(page, NAMES).lstrip(b"\n") == lines


def test_number_of_lines_is_limited() -> None:
    page = b"blocks 1\n" * (MAX_METRIC_LINES + 9)
    assert find_lines(page, NAMES) == b"blocks 1\n" * MAX_METRIC_LINES
