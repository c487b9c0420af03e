"""Free TCP ports."""

import socket
from contextlib import ExitStack


def free_ports(count: int) -> list[int]:
    """Nobody listened on them a moment ago; all different."""
    with ExitStack() as open_sockets:
        ports = []
        for _ in range(count):
            listener = open_sockets.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            ports.append(int(listener.getsockname()[1]))
        return ports
