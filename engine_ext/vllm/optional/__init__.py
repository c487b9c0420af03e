"""Tier 2: features that a new release of vLLM may cost, each alone.

Each has its probe (the symbols), its patch list and its off switch: its name in DISAGG_VLLM_DISABLE
(see compat/support.py). Features that share patches share a folder: their symbols are in its
`__init__`, beside the patches and the parts of our scheduler class.
"""

from engine_ext.vllm.optional.answers import PREEMPTION_RETURN, RESUME, THRESHOLD
from engine_ext.vllm.optional.engine_loop import EARLY_EXIT, IDLE_REST
from engine_ext.vllm.optional.load_failures import LOAD_FAILURES
from engine_ext.vllm.optional.loans import LENDING
from engine_ext.vllm.optional.several_connectors import SEVERAL
from engine_ext.vllm.optional.steps import STEP_BUDGET, STEP_MODEL
from engine_ext.vllm.optional.streams import STREAMS
from engine_ext.vllm.optional.without_patch import (
    EARLY_WRITES,
    FAILURE_POLICY,
    LAST_WINDOW,
    LOOKAHEAD,
    RENDERS,
    SCHEDULER,
    STATE_LAYERS,
    STOCK_PEERS,
)

TIER_2 = (
    STOCK_PEERS,
    SEVERAL,
    EARLY_EXIT,
    STREAMS,
    LOAD_FAILURES,
    RENDERS,
    SCHEDULER,
    FAILURE_POLICY,
    IDLE_REST,
    LENDING,
    LAST_WINDOW,
    EARLY_WRITES,
    STEP_MODEL,
    STEP_BUDGET,
    STATE_LAYERS,
    LOOKAHEAD,
    THRESHOLD,
    RESUME,
    PREEMPTION_RETURN,
)
