"""Clients that abuse a listener: `python -m tests.integration.abusers PORT NUMBER`.

Says `at it` once each has begun; a line on standard input ends them, and it prints how often they
did.
"""

import contextlib
import random
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import zmq

from engine_ext.wire.handshake import encode_request

ZMTP_GREETING = b"\xff" + b"\0" * 8 + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" * 32


def abuse(port: int, seed: int, begun: threading.Barrier, stop: threading.Event) -> int:
    """Garbage, half-open connections and floods of questions; returns how often."""
    rng = random.Random(seed)
    context: zmq.Context[Any] = zmq.Context()
    peer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    peer.setsockopt(zmq.SNDHWM, 100)
    peer.connect(f"tcp://127.0.0.1:{port}")
    count = 0
    while not stop.is_set():
        count += 1
        with contextlib.suppress(zmq.Again):
            peer.send_multipart([b"", rng.randbytes(rng.randrange(300))], zmq.NOBLOCK)
            peer.send_multipart([b"", encode_request((0, 0))], zmq.NOBLOCK)
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port), timeout=5) as connection,
        ):
            connection.sendall(ZMTP_GREETING[: rng.randrange(64)])
        if count == 1:
            begun.wait(10)
        stop.wait(0.002)
    context.destroy(linger=0)
    return count


def main(port: str, number: str) -> None:
    stop, begun = threading.Event(), threading.Barrier(int(number) + 1)
    with ThreadPoolExecutor(int(number)) as pool:
        abusers = [pool.submit(abuse, int(port), seed, begun, stop) for seed in range(int(number))]
        begun.wait(10)
        print("at it", flush=True)
        sys.stdin.readline()
        stop.set()
        print(sum(abuser.result(timeout=30) for abuser in abusers), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
