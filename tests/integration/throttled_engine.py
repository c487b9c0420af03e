"""A reference engine whose READs from the engines whose side channels' ports are in a file, one a
line, take SECONDS, as over a path that has fallen back to a slow transport.

Run as `python -m tests.integration.throttled_engine --throttled FILE`, with the options of
`disagg-engine`.
"""

from pathlib import Path

from engine_ext.worker.pulls import ActivePull, Pulls
from tests.integration.cut_off_engine import run_engine

SECONDS = 2.0


def throttle(ports: Path) -> None:
    """From now on, in this process; the file is read for each READ."""
    finish = Pulls._ask_nixl

    def ask_later(self: Pulls, reading: ActivePull, now: float) -> None:
        is_slow = str(reading.order.source.address.port) in ports.read_text().split()
        if not is_slow or now > reading.began + SECONDS:
            finish(self, reading, now)

    Pulls._ask_nixl = ask_later  # type: ignore[method-assign] # the planted fault


if __name__ == "__main__":
    run_engine("--throttled", throttle)
