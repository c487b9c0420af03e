"""Three hundred conversations in vLLM, among engines that are killed and frozen. No answer may be
wrong, and no block may stay behind."""

import asyncio
import logging
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from tests.integration.legs import coordinates_in
from tests.integration.processes import Launcher, Server, wait_for
from tests.soak.conversations import Conversations
from tests.soak.fleet import LEASE
from tests.soak.fleet import Fleet as SoakFleet
from tests.soak.test_soak import Freeze, Kill
from tests.vllm.measures import freed
from tests.vllm.servers import OURS, PUSH, SCHEDULER, Fleet, Kind

logging.getLogger("httpx").setLevel(logging.WARNING)

CONVERSATIONS = 150
"""In each of the two modes."""
EXTRA = {
    "bidirectional_kv_xfer": True,
    "decoder_kv_blocks_ttl": 20,
    "kv_lease_duration": LEASE,
    "push_registration_timeout": 10,
    "push_write_bound": 12,
}
MISHAPS = (Freeze("d", 0.5, 3), Kill("d1"), Freeze("p", LEASE + 0.5, LEASE + 3), Kill("p2"))
REST_SECONDS = 60


class VllmFleet(SoakFleet):
    """A soak fleet of vLLM servers. A restarted engine listens on another port."""

    def __init__(self, fleet: Fleet, mode: str, stack: ExitStack) -> None:
        super().__init__(Launcher(fleet.logs, fleet.model, fleet.free_ports), mode, stack, {})
        self._fleet = fleet
        connector: dict[str, Any] = OURS if mode == "pull" else PUSH
        self._transfer = {**connector, "kv_connector_extra_config": EXTRA}

    def _start(self, name: str) -> None:
        policy = {"kv_load_failure_policy": "recompute" if name == "d2" else "fail"}
        kind = Kind(f"talks-{name}", {**self._transfer, **policy}, SCHEDULER)
        server = self._stack.enter_context(self._fleet.server(kind))
        self.servers[name] = server
        self.coordinates[name] = coordinates_in(server.get("/disagg/identity").json()["ranks"][0])


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_conversations_with_turns_and_loans_among_engines_killed_and_frozen(
    fleet: Fleet, alone: Server, mode: str
) -> None:
    with ExitStack() as stack:
        engines = VllmFleet(fleet, mode, stack)
        await asyncio.to_thread(engines.start_all)
        conversations = Conversations(engines, alone, mode)
        await conversations.run(CONVERSATIONS, MISHAPS)
        for server in engines.servers.values():
            await asyncio.to_thread(wait_for, partial(freed, server), server.name, REST_SECONDS)
    conversations.check()
