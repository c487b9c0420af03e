"""Free TCP ports."""

import itertools
import random
import socket
from collections.abc import Iterator, Sequence


def free_ports(count: int) -> list[int]:
    """Nobody listened on them a moment ago; all different. None that an outgoing connection may
    take before somebody listens."""
    return list(itertools.islice(_ports, count))


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


_ports = free_ports_of(range(7_100, 10_000))
