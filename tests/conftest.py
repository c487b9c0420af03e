import os
import socket
from collections.abc import Callable
from contextlib import ExitStack

import pytest

# UCX otherwise looks for RDMA devices only.
os.environ.setdefault("UCX_NET_DEVICES", "all")
os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")


@pytest.fixture
def free_ports() -> Callable[[int], list[int]]:
    """Ports nobody listened on a moment ago, all different."""

    def find(count: int) -> list[int]:
        with ExitStack() as open_sockets:
            ports = []
            for _ in range(count):
                listener = open_sockets.enter_context(socket.socket())
                listener.bind(("127.0.0.1", 0))
                ports.append(listener.getsockname()[1])
            return ports

    return find
