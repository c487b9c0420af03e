import os
import socket
from contextlib import ExitStack

# UCX otherwise looks for RDMA devices only.
os.environ.setdefault("UCX_NET_DEVICES", "all")
os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")


def find_free_ports(count: int) -> list[int]:
    """Ports nobody listened on a moment ago, all different."""
    with ExitStack() as open_sockets:
        ports = []
        for _ in range(count):
            listener = open_sockets.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            ports.append(listener.getsockname()[1])
        return ports
