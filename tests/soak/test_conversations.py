"""Two thousand conversations among engines that are killed and frozen. No answer may be wrong, and
no block may stay behind."""

import asyncio
from contextlib import ExitStack

import pytest

from tests.integration.processes import Launcher, Server
from tests.soak.conversations import Conversations
from tests.soak.fleet import Fleet
from tests.soak.test_soak import MISHAPS, rests

CONVERSATIONS = 1000
"""In each of the two modes."""
EXTRA = {"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": 20}
OPTIONS = ("--num-blocks", "600", "--max-num-seqs", "16")


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_conversations_with_turns_and_loans_among_engines_killed_and_frozen(
    launcher: Launcher, alone: Server, mode: str
) -> None:
    with ExitStack() as stack:
        fleet = Fleet(launcher, mode, stack, EXTRA, OPTIONS)
        await asyncio.to_thread(fleet.start_all)
        conversations = Conversations(fleet, alone, mode)
        await conversations.run(CONVERSATIONS, MISHAPS)
        await asyncio.gather(*(asyncio.to_thread(rests, each) for each in fleet.servers.values()))
    conversations.check()
