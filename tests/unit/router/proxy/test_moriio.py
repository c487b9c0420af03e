"""vLLM's MoRIIOConnector. Its real engines need ROCm. These scripts refuse what the functions that
they name raise, or wait forever, for: vLLM 0.32, kv_connector/v1/moriio."""

import asyncio
import contextlib
import json
import re
from typing import Any

import pytest

from scripts.mock_engine import MockEngine, Peer, Received
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import fails, usual_decode
from tests.unit.router.harness import eventually
from tests.unit.router.mock_engine import USUAL
from tests.unit.router.proxy.test_kv_protocols import refuse
from tests.unit.router.proxy.test_ranks import vllm_metrics

P_HOST, P_PORTS = "10.9.8.7", {"remote_handshake_port": 7301, "remote_notify_port": 62005}
# moriio_common.py, get_peer_zmq_from_request_id: such an id has precedence over the params.
EMBEDDED = re.compile(r"___(prefill|decode)_addr_")


def finished(params: dict[str, Any], block_ids: list[list[int]], rank: int = 0) -> dict[str, Any]:
    """moriio_connector.py, request_finished: what a prefill engine answers, in both modes."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": block_ids,
        "remote_engine_id": f"{P_HOST}:7301",
        "remote_host": P_HOST,
        **P_PORTS,
        "remote_dp_rank": rank,
        "remote_dp_rank_override": True,
        "remote_dp_size": 2,
        "remote_dp_size_local": 2,
        "tp_size": 8,
        "transfer_id": params["transfer_id"],
    }


def problem_of_peer(request: Received, params: dict[str, Any]) -> str:
    """moriio_common.py, MoRIIOConnectorMetadata.add_new_req: why it raises, or ""."""
    missing = {
        "transfer_id", "remote_engine_id", "remote_block_ids", "remote_host",
        "remote_handshake_port", "remote_notify_port",
    } - params.keys()  # fmt: skip
    if missing:
        return f"KeyError: {missing}"
    if EMBEDDED.search(request.header("x-request-id") or ""):
        return "the peer is the one that the client names"
    if not params["remote_host"]:
        return "cannot route MoRI-IO transfer"
    return ""


class WritingEngines:
    """A prefill and a decode engine in WRITE mode, where the first writes into the second."""

    def __init__(self, prefiller: MockEngine, *decoders: MockEngine) -> None:
        self.held: dict[str, Any] = {}
        """The params of the transfers that the prefill engine holds KV for, by transfer_id."""
        self.stranded = 0
        """Aborted legs whose blocks the decode engine keeps for good."""
        self.written = asyncio.Event()
        self.written.set()
        prefiller.usual = self.prefill
        for decoder in decoders:
            decoder.usual = self.decode

    async def prefill(self, request: Received, peer: Peer) -> None:
        body, params = request.json, request.json.get("kv_transfer_params") or {}
        # moriio_connector.py, request_finished: KV is held after one token that ends no answer.
        if (body["max_tokens"], body.get("min_tokens"), body["stream"]) != (1, 1, False):
            return await refuse(peer, "not certainly FINISHED_LENGTH_CAPPED")
        # update_state_after_alloc
        if not params.get("do_remote_decode") or params.get("do_remote_prefill"):
            return await refuse(peer, "no KV is saved for anybody")
        if problem := problem_of_peer(request, params):
            return await refuse(peer, problem)
        # _write_blocks_for_req: remote_block_ids[0] are those of the first group of layers.
        if params["remote_block_ids"] and not isinstance(params["remote_block_ids"][0], list):
            return await refuse(peer, "object is not iterable")
        self.held[params["transfer_id"]] = params
        await peer.answer({**USUAL, "kv_transfer_params": finished(params, [[3, 2, 1]], rank=1)})

    async def decode(self, request: Received, peer: Peer) -> None:
        params = request.json.get("kv_transfer_params") or {}
        # get_num_new_matched_tokens
        if not params.get("do_remote_prefill") or params.get("do_remote_decode"):
            return await refuse(peer, "the prompt is computed here")
        # update_state_after_alloc: this engine's rank is 0, so it tells nobody of its blocks
        # because of remote_dp_rank 1, and waits forever.
        if params.get("remote_dp_rank_override") and params.get("is_request_leader") is not True:
            return await refuse(peer, "WAITING_FOR_REMOTE_KVS")
        if EMBEDDED.search(request.header("x-request-id") or ""):
            return await refuse(peer, "the peer is the one that the client names")
        address = {name: params.get(name) for name in ("remote_host", "remote_notify_port")}
        if address != {"remote_host": P_HOST, "remote_notify_port": 62005}:
            return await refuse(peer, f"nobody listens at {address}")
        # moriio_engine.py, _is_remote_ready: the write waits for the id that the decode leg names.
        given = self.held.pop(params["transfer_id"], None)
        if given is None:
            return await refuse(peer, "no such transfer")
        # _execute_write_task: it writes to the rank that has named its blocks.
        if given["remote_dp_size"] < 1:
            return await refuse(peer, "no handshake with this rank")
        leaving = asyncio.create_task(peer.wait_left())
        writing = asyncio.create_task(self.written.wait())
        await asyncio.wait((leaving, writing), return_when=asyncio.FIRST_COMPLETED)
        if not self.written.is_set():
            # scheduler.py, finish_requests: blocks are freed when the KV has come. That is never
            # known here, since request_finished forgets the transfer_id.
            self.stranded += 1
        for task in (leaving, writing):
            task.cancel()
        await usual_decode(request, peer)


@pytest.fixture
def writing(p: MockEngine, d: MockEngine) -> WritingEngines:
    return WritingEngines(p, d)


@pytest.mark.parametrize("stream", [False, True])
async def test_prefill_engine_gets_the_address_of_the_decode_engine_into_which_it_writes(
    start_router: StartRouter, p: MockEngine, d: MockEngine, writing: WritingEngines, stream: bool
) -> None:
    router = await start_router(kv_protocol="moriio")
    for _ in range(2):
        answer = await router.complete(stream=stream, stop=["x"])
        assert answer.status_code == 200
        assert "kv_transfer_params" not in answer.text
    given = [request.json["kv_transfer_params"] for request in p.requests]
    assert len({one["transfer_id"] for one in given}) == 2
    for one in given:
        assert one["remote_host"] == "127.0.0.1"
        assert (one["remote_handshake_port"], one["remote_notify_port"]) == (6301, 61005)
        assert one["remote_dp_size"] == 1
    assert not writing.held
    assert len(d.requests) == 2
    assert d.last.json["max_tokens"] == 7
    labels = {"endpoint": "/v1/completions", "flow": "moriio", "status": "200", "outcome": "ok"}
    await eventually(lambda: router.metric("requests_total", **labels) == 2)


async def test_prefill_engine_meets_all_ranks_of_the_decode_engine(
    start_router: StartRouter, p: MockEngine, d: MockEngine, writing: WritingEngines
) -> None:
    d.pages["/metrics"] = vllm_metrics(0, 1, 2)
    router = await start_router(kv_protocol="moriio")
    await eventually(lambda: len(router.engine(d).ranks or ()) == 3)
    await router.complete()
    assert p.last.json["kv_transfer_params"]["remote_dp_size"] == 3


async def test_client_that_leaves_while_its_prompt_is_computed_has_nothing_held_for_it(
    start_router: StartRouter, p: MockEngine, d: MockEngine, writing: WritingEngines
) -> None:
    asked, left = asyncio.Event(), asyncio.Event()

    async def compute(request: Received, peer: Peer) -> None:
        asked.set()
        await peer.wait_left()
        left.set()

    p.scripts.append(compute)
    router = await start_router(kv_protocol="moriio")
    async with disconnecting(router.complete()):
        await asked.wait()
    await left.wait()
    await router.settled()
    assert not d.requests


async def test_decode_leg_of_a_client_that_has_left_goes_on_until_the_kv_was_written(
    start_router: StartRouter, d: MockEngine, writing: WritingEngines
) -> None:
    router = await start_router(kv_protocol="moriio")
    writing.written.clear()
    async with disconnecting(router.complete()):
        await eventually(lambda: d.requests)
    await eventually(lambda: router.metric("client_disconnects_total", stage="decode") == 1)
    writing.written.set()
    await router.settled()
    assert not writing.stranded


@contextlib.asynccontextmanager
async def disconnecting(sending: Any) -> Any:
    """Send a request whose client disconnects at the end of the block."""
    task = asyncio.create_task(sending)
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_failed_decode_leg_is_a_new_transfer_to_another_engine(
    start_router: StartRouter, p: MockEngine, d: MockEngine, d2: MockEngine
) -> None:
    writing = WritingEngines(p, d, d2)
    d.scripts.append(fails)
    router = await start_router(ds=[d, d2], kv_protocol="moriio")
    answers = [await router.complete() for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200] * 2
    assert not d.scripts
    # No other decode engine reads it: it would be written into blocks of the first one.
    assert len(writing.held) == 1
    assert len(p.requests) == 3


async def test_prefill_engines_answer_without_params_is_a_failure(
    start_router: StartRouter, p: MockEngine, p2: MockEngine, writing: WritingEngines
) -> None:
    p2.usual = lambda request, peer: peer.answer(USUAL)
    router = await start_router(ps=[p2, p], kv_protocol="moriio")
    answers = [await router.complete() for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200] * 2
    assert router.metric("retries_total", kind="broken_answer", role="prefill") == 1


async def test_read_mode_needs_no_setting_and_its_params_are_passed_on_unchanged(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    """In READ mode the decode engine reads, as with the NixlConnector."""
    block_ids = [[3, 2, 1], [], [7]]

    async def prefill(request: Received, peer: Peer) -> None:
        params = request.json["kv_transfer_params"]
        # update_state_after_alloc makes up a transfer_id. request_finished holds KV for a decode
        # engine only.
        if not params["do_remote_decode"] or request.json["max_tokens"] != 1:
            return await refuse(peer, "no KV is held")
        params["transfer_id"] = f"sidecar-{request.header('x-request-id')}"
        held.update(finished(params, block_ids, rank=1))
        await peer.answer({**USUAL, "kv_transfer_params": held})

    async def decode(request: Received, peer: Peer) -> None:
        params = request.json["kv_transfer_params"]
        if problem := problem_of_peer(request, params):
            return await refuse(peer, problem)
        # update_state_after_alloc: zip(local_block_ids, remote_block_ids, strict=True)
        if [len(group) for group in params["remote_block_ids"]] != [3, 0, 1]:
            return await refuse(peer, "zip() argument 2 is shorter than argument 1")
        await usual_decode(request, peer)

    held: dict[str, Any] = {}
    p.usual, d.usual = prefill, decode
    router = await start_router()
    assert (await router.complete()).status_code == 200
    given = d.last.json["kv_transfer_params"]
    assert given.pop("retain") is False
    assert json.dumps(given) == json.dumps(held)
    assert len(held) == 13
