"""A reference engine whose KV travels by way of host buffers although it is in host memory.

Run as `python -m tests.integration.staging_engine`, with the options of `disagg-engine`.
`DISAGG_TEST_UNSAVED=1` plants the error that the oracle must see: nothing is copied out.
"""

import os
import sys

from engine_ext.common.types import BlockIds
from engine_ext.reference import cli, host, kv_cache
from engine_ext.worker.torch_memory import HostBuffer


class Forgetful(HostBuffer):
    def save(self, block_ids: BlockIds) -> None:
        pass


if __name__ == "__main__":
    host.is_staged = lambda config, engine: True
    if os.environ.get("DISAGG_TEST_UNSAVED"):
        kv_cache.HostBuffer = Forgetful  # type: ignore[attr-defined] # the planted error
    sys.exit(cli.main())
