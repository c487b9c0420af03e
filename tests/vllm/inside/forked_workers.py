"""Have vLLM fork its engine core and workers, which share what the fork server has imported.

vLLM's CPU platform asks for `spawn`, which imports everything again in each process: 15 s of CPU
time for each engine. vLLM supports `fork` and uses it by default elsewhere.
"""

import os
from typing import Any

from vllm.platforms.cpu import CpuPlatform

_original = CpuPlatform.check_and_update_config.__func__


def check_and_update_config(cls: type, vllm_config: Any) -> None:
    _original(cls, vllm_config)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
