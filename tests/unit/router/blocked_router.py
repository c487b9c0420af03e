"""The router with an event loop that stands still, some time after it began to serve."""

import sys
import time

from router.commands.cli import main
from router.fleet.probes import Prober


async def stand_still(self: Prober) -> None:
    time.sleep(60)  # noqa: ASYNC251 # that is what it is for


if __name__ == "__main__":
    Prober.run = stand_still  # type: ignore[method-assign]
    sys.exit(main())
