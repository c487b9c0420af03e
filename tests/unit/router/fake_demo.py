"""The demo with an engine that serves nothing but its part: run as a script by test_demo.

As an engine: `fake_demo.py engine MODE --port N ...`, where MODE is good, stubborn (ignores
SIGTERM), dying, or offline (whose chat model cannot be had). As a maker of
models: `fake_demo.py tiny DIR` and `fake_demo.py chat MODE DIR`. Else: `fake_demo.py demo PORT MODE
FLAG...`.
"""

import json
import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from router.commands.demo.command import main as demo
from router.commands.demo.engines import EngineCommands

ME = [sys.executable, str(Path(__file__))]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        side_channel = os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"]
        self._answer(
            {
                "got": json.dumps(body),
                "choices": [{}],
                "kv_transfer_params": {"remote_port": side_channel},
            }
        )

    def _answer(self, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


def serve_engine(mode: str, arguments: list[str]) -> None:
    if mode == "dying":
        sys.exit("no such device")
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    port = int(arguments[arguments.index("--port") + 1])
    assert Path(arguments[arguments.index("--model") + 1]).is_dir()
    if "--kv-transfer-config" in arguments:  # an engine alone has none
        transfer = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
        assert transfer["kv_connector_extra_config"]["bidirectional_kv_xfer"] is True
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


def main(role: str, *arguments: str) -> int:
    if role == "engine":
        serve_engine(arguments[0], list(arguments[1:]))
    elif role == "tiny":
        Path(arguments[0]).mkdir()
    elif role == "chat":
        print("Fetching it: 100%")
        if arguments[0] == "offline":
            sys.exit("Traceback\nllm-x==1 cannot be fetched: no network")
        Path(arguments[1]).mkdir(parents=True)
    else:
        port, mode, *flags = arguments
        engines = EngineCommands(
            reference=[*ME, "engine", mode],
            tiny_model=[*ME, "tiny"],
            chat_model=[*ME, "chat", mode],
            vllm=[str(Path(__file__)), "engine", mode],
            needed=("json",),
            find_vllm=lambda: sys.executable,
        )
        sized = ["--port", port, "--prefillers", "2", "--decoders", "1"]
        return demo([*sized, *flags], engines)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
