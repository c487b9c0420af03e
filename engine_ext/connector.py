"""The two halves of the connector that an engine uses, and the calls that the host makes. The host
calls them where vLLM's v1 engine calls a connector.

Scheduler half, in the engine's scheduler, in this order for one request:
`on_new_request` once; `get_num_new_matched_tokens` whenever a waiting request with no computed
tokens is considered; `update_state_after_alloc` after its blocks were allocated; then
`build_connector_meta` once per step, `update_connector_output` after each step's results, and
`request_finished` before its blocks are freed.

Worker half, where the KV memory is: `register_kv_caches` once; per step `start_load_kv`, then the
forward pass, `wait_for_save` and `get_transfer_results`. With host buffers, and if prompts are
pushed while they are computed (`wants_steps`), the host calls `on_step` of the scheduler half for
each request of a step before `build_connector_meta`, and `on_preempted` for each request that has
lost its blocks.

An engine with several tensor ranks has one scheduler half, and a worker half per rank. Each step's
metadata goes to all of them, and the host combines their results: an id counts when every rank has
reported it, and as failed if it failed on any rank.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from engine_ext.common.config import ConnectorConfig
from engine_ext.common.types import CacheGeometry, EngineIdentity, Region
from engine_ext.push.component import Push
from engine_ext.scheduler.scheduler import SchedulerConnector
from engine_ext.wire.errors import CONNECTOR_VERSION
from engine_ext.worker.push_component import PushFactory
from engine_ext.worker.staging import StagingFactory
from engine_ext.worker.worker import AgentFactory, WorkerConnector

__all__ = ["Connector", "SchedulerConnector", "WorkerConnector", "build_connector", "build_worker"]


class Connector(NamedTuple):
    """Both halves, for a host that runs them in one process."""

    scheduler: SchedulerConnector
    worker: WorkerConnector

    def start(self, regions: Sequence[Region], stage: StagingFactory | None = None) -> None:
        """Registers the KV memory and starts to answer handshakes. `stage` makes host buffers.

        Raises AgentError when NIXL refuses, OSError when the side channel is taken.
        """
        self.worker.register_kv_caches(regions, stage)
        self.scheduler.set_handshake_metadata({(0, 0): self.worker.get_handshake_payload()})

    def shutdown(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()


def build_connector(
    config: ConnectorConfig,
    geometry: CacheGeometry,
    *,
    host: str,
    port: int,
    model_factors: Mapping[str, str],
) -> Connector:
    """`host` and `port` are the side channel's; `model_factors` what must be equal on both ends.

    Raises UnsupportedError for what `support` refuses.
    """
    factors = {
        **model_factors,
        "connector_version": str(CONNECTOR_VERSION),
        "transfer_mode": config.transfer_mode,
    }
    identity = EngineIdentity(config.engine_id, host, port, compat_factors=factors)
    return Connector(
        SchedulerConnector(config, identity, geometry), build_worker(config, geometry, identity)
    )


def build_worker(
    config: ConnectorConfig,
    geometry: CacheGeometry,
    identity: EngineIdentity,
    open_agent: AgentFactory | None = None,
) -> WorkerConnector:
    """Build the worker half. Only an engine in push mode gets the component that pushes.

    Raises UnsupportedError for what `support` refuses.
    """
    open_push = push_of(config)
    return WorkerConnector(config, geometry, identity, open_agent, open_push=open_push)


def push_of(config: ConnectorConfig) -> PushFactory | None:
    """Return what builds the push component of such an engine; None in pull mode."""
    return Push if config.transfer_mode == "push" else None
