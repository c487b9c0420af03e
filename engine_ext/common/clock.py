"""The clock of leases and bounds. It continues while the machine is suspended, as the clocks of
peers do.

A virtual machine that its host stops has no such clock: see docs/engine-half.md, "Leases".
"""

import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boottime() -> float:
    """Return the seconds of a monotonic clock that counts suspended time."""
    return time.clock_gettime(_CLOCK)
