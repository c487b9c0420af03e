"""Free TCP ports."""

import itertools
import random
import socket
from collections.abc import Iterator, Sequence
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


def free_ports_of(ports: Sequence[int]) -> Iterator[int]:
    """These over and over, from a random one on, without those that somebody listens on."""
    start = random.SystemRandom().randrange(len(ports))
    return filter(_is_free, itertools.cycle([*ports[start:], *ports[:start]]))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
