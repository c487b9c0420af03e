"""The clock of leases and bounds: it goes on while the machine is suspended, as its peers' do.

A virtual machine that its host stops has no such clock; see docs/engine.md, Leases.
"""

import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boottime() -> float:
    """Seconds, monotonic."""
    return time.clock_gettime(_CLOCK)
