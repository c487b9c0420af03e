"""This checkout's router while it is watched: `watched.py page|traces PORT PREFILLER DECODER`.

`page`: somebody looks at its page all the time. `traces`: a collector takes all spans.
Who watches is another process, on all cores, and no descendant of the router: its CPU is nobody's.
"""

import os
import subprocess
import sys
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.error import URLError

START = 60.0
"""Seconds in which the router should answer who wants to look."""
BLOCK = 65536


def main() -> None:
    what, port, prefiller, decoder = sys.argv[1:]
    router = [
        *(sys.executable, "-m", "router.commands.cli", "--port", port),
        *("--prefiller-hosts", "127.0.0.1", "--prefiller-ports", prefiller),
        *("--decoder-hosts", "127.0.0.1", "--decoder-ports", decoder),
    ]
    if what == "page":
        _in_another_process("look", port)
        os.execv(router[0], [*router, "--ui"])
    where = _in_another_process("collect", str(os.getpid()))
    os.environ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] = f"http://127.0.0.1:{where}/v1/traces"
    os.execv(router[0], router)


def _in_another_process(*arguments: str) -> str:
    """Its first line."""
    child = subprocess.Popen(
        [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    said = child.stdout.readline().strip()
    child.wait()  # it has left the work to a child of its own
    return said


def look(port: str) -> None:
    """Reads what the page would, until the router ends."""
    print(flush=True)
    latest = time.monotonic() + START
    while time.monotonic() < latest:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ui/events") as answer:
                while answer.read1(BLOCK):
                    pass
            return
        except (URLError, OSError):
            time.sleep(0.1)


class Collector(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


def collect(router: str) -> None:
    """Until that process has ended."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        server.timeout = 1.0
        print(server.server_port, flush=True)
        while Path("/proc", router).exists():
            server.handle_request()


if __name__ == "__main__":
    if sys.argv[1:2] in (["look"], ["collect"]):
        if os.fork():
            os._exit(0)
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        {"look": look, "collect": collect}[sys.argv[1]](*sys.argv[2:])
    else:
        main()
