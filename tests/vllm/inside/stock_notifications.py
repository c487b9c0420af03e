"""What stock's connectors send over NIXL and what they make of ours: their own code, without NIXL.

Their workers are made without `__init__`, which wants a GPU's memory, and with what the methods
under test look at.
"""

import queue
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from engine_ext.wire.notifications import (
    Heartbeat,
    PushExtension,
    PushRegistered,
    ReadDone,
    decode_notification,
    encode_heartbeat,
    encode_read_done,
    encode_registration,
)

REQUEST = "cmpl-a:0"
PARAMS = {
    "do_remote_prefill": True,
    "remote_engine_id": "p",
    "remote_host": "10.0.0.7",
    "remote_port": 5600,
    "tp_size": 2,
    "pp_size": 1,
}
EXTENSION = PushExtension(1, 0, 48, b"digest", "remote", 0.0)


def bare(cls: type[Any], **attributes: Any) -> Any:
    made = type(
        cls.__name__, (cls,), {"__init__": lambda self: None, "__del__": lambda self: None}
    )()
    vars(made).update(attributes)
    return made


def puller(*received: bytes, **attributes: Any) -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import (
        NixlPullConnectorWorker,
    )

    return bare(
        NixlPullConnectorWorker,
        nixl_wrapper=Mock(get_new_notifs=lambda: {"agent": list(received)}),
        transfer_topo=Mock(block_size_ratio=lambda size: 1),
        _remote_agents={"p": {(0, 0): "agent"}},
        _engine_last_active={},
        **attributes,
    )


def sent_by(worker: Any) -> bytes:
    (call,) = worker.nixl_wrapper.send_notif.call_args_list
    message: bytes = call.kwargs["notif_msg"]
    return message


def a_heartbeat_is_read_alike() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import HeartbeatInfo

    sender = puller(_ensure_handshake=lambda *peer: None, _hb_handshake_notif_only=False)
    info = HeartbeatInfo({REQUEST, "b"}, "10.0.0.7", 5600, 1)
    sender._send_heartbeats(SimpleNamespace(heartbeat_by_engine={"p": info}))
    heard = decode_notification(sent_by(sender))
    assert isinstance(heard, Heartbeat)
    assert set(heard.request_ids) == {REQUEST, "b"}
    leases = {REQUEST: 0.0, "b": 0.0, "c": 0.0}
    message = encode_heartbeat((REQUEST, "b"))
    holder = puller(message, _lease_extension=30, _reqs_to_send=leases)
    assert holder._get_new_notifs() == set()
    assert [name for name, until in leases.items() if until] == [REQUEST, "b"]


def the_end_of_a_read_is_read_alike() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import ReadSpec

    reader = puller()
    reader._read_blocks(
        read_spec=ReadSpec(remote_rank=0, local_block_ids=([],), remote_block_ids=([],)),
        dst_engine_id="p",
        request_id="d",
        remote_request_id=REQUEST,
        local_xfer_side_handle=0,
        local_dram_handle=None,
        remote_xfer_side_handle=0,
        expected_consumers=2,
        awaiting_kvs=False,
    )
    assert decode_notification(sent_by(reader)) == ReadDone(REQUEST, 2)
    holder = puller(
        *[encode_read_done(REQUEST, 2)] * 2,
        _reqs_to_send={REQUEST: 0.0},
        _reqs_to_process={REQUEST},
        consumer_notification_counts_by_req=defaultdict(int),
        expected_consumer_notifications_by_req={},
    )
    assert holder._get_new_notifs() == {REQUEST}


def a_registration_is_read_alike() -> None:
    said = registered_by_stock()
    sender = pusher(_handshake_lock=nullcontext(), _remote_agents={"p": {(0, 0): "agent"}})
    sender._do_send_reg_notif(REQUEST, said)
    ours = decode_notification(sent_by(sender))
    assert isinstance(ours, PushRegistered)
    assert {name: getattr(ours, name) for name in said} == said
    assert ours == PushRegistered(**said)
    holder = pusher(_push_finished_blocks={}, _pending_d_registrations={})
    holder._handle_push_reg_notif(encode_registration(PushRegistered(**said, disagg=EXTENSION)))
    heard = holder._pending_d_registrations[REQUEST]
    assert {name: heard[name] for name in said} == said | {"local_block_ids": [[3, 5]]}


def the_end_of_a_write_is_read_by_stock() -> None:
    """By a decode engine of one rank, of two that wrote into its blocks."""
    received: queue.Queue[bytes] = queue.Queue()
    done: dict[str, list[int]] = {}
    decoder = pusher(
        transfer_topo=Mock(),
        world_size=1,
        consumer_notification_counts_by_req=defaultdict(int),
        _pending_completion_notifs=received,
        _recving_metadata={REQUEST: SimpleNamespace(pp_size=1)},
        _recving_transfers=done,
        _reqs_to_send={},
        _reqs_to_process=set(),
    )
    for ended in (False, True):
        received.put(encode_read_done(REQUEST, 2))
        assert decoder._get_new_notifs() == set()
        assert (REQUEST in done) is ended


def pusher(**attributes: Any) -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import (
        NixlPushConnectorWorker,
    )

    return bare(NixlPushConnectorWorker, nixl_wrapper=Mock(), **attributes)


def registered_by_stock() -> dict[str, Any]:
    """By a decode engine, of one request."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import (
        NixlPushConnectorScheduler,
    )

    pending: dict[str, dict[str, Any]] = {}
    scheduler = bare(
        NixlPushConnectorScheduler,
        engine_id="d",
        side_channel_host="10.0.0.8",
        side_channel_port=5601,
        use_host_buffer=False,
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=1)),
        get_exchange_clipped_blocks=tuple,
        _push_pending_registrations=pending,
        _push_registration_deadlines={},
        _push_registration_timeout=30.0,
        _reqs_need_recv={},
    )
    request = SimpleNamespace(request_id=REQUEST, kv_transfer_params=dict(PARAMS))
    blocks = SimpleNamespace(get_unhashed_block_ids_all_groups=lambda: [(3, 5)])
    scheduler.update_state_after_alloc(request, blocks, 32)
    return pending[REQUEST]


CASES: tuple[Callable[[], None], ...] = (
    a_heartbeat_is_read_alike,
    the_end_of_a_read_is_read_alike,
    a_registration_is_read_alike,
    the_end_of_a_write_is_read_by_stock,
)
