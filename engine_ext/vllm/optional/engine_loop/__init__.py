"""Features of vLLM's engine loop: it rests while no request can run, and it exits early."""

from engine_ext.vllm.compat.probe import Feature, symbols
from engine_ext.vllm.compat.vllm_symbols import CONFIG, ENGINE, SCHED, SCHEDULER_CLASS
from engine_ext.vllm.optional.without_patch import SCHEDULER

_ENGINE_LOOP = symbols(f"""
    - the loop of the engine: what is called before it sleeps or ends, and what wakes it. The
        engine sleeps while KV has come, or leaves while a remote reads
    {ENGINE}.core:EngineCoreProc._handle_shutdown takes self
    {ENGINE}.core:EngineCoreProc has input_queue scheduler shutdown_state vllm_config
    {ENGINE}.core:EngineShutdownState has REQUESTED
    {ENGINE}:EngineCoreRequestType has WAKEUP
    {CONFIG}:VllmConfig has shutdown_timeout
    {SCHED}.interface:PauseState has UNPAUSED
""")

EARLY_EXIT = Feature(
    "early_exit",
    "an engine that shuts down or pauses waits for retained turns until they expire",
    _ENGINE_LOOP
    + symbols(f"""
        - pause and sleep. Both wait until retained turns expire, even if no engine reads them
        {SCHEDULER_CLASS}.set_pause_state takes self pause_state
    """),
    modules=("optional.engine_loop.patch_engine_loop",),
)
"""The connector itself installs the patches of the engine's loop, with the plugin or without."""

IDLE_REST = Feature(
    "idle_rest",
    "an engine takes steps all the time while it waits for readers or for KV",
    _ENGINE_LOOP
    + symbols(f"""
        - what the scheduler still has to do. The engine rests while a request could run
        {SCHEDULER_CLASS} has connector ec_connector failed_recving_kv_req_ids
            finished_recving_kv_req_ids finished_req_ids has_finished_requests has_requests
            kv_holding_waiting pause_state running schedule waiting
        vllm.v1.request:RequestStatus has WAITING_FOR_REMOTE_KVS
        {CONFIG}:ParallelConfig has distributed_executor_backend nnodes
    """),
    requires=(SCHEDULER,),
    modules=("optional.engine_loop.idle_rest", "optional.engine_loop.patch_engine_loop"),
)
