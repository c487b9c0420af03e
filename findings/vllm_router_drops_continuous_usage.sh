#!/usr/bin/env bash
# vllm-router 0.1.17, prefill and decode: a streamed chat with vLLM's
# `stream_options: {"include_usage": true, "continuous_usage_stats": true}` reaches the decode engine
# without `continuous_usage_stats`.
#
# Guess: fields of vLLM that the router does not know pass, as `chat_template_kwargs`, `cache_salt` and
# `vllm_xargs` do at the top of the same request.
# Seen: those pass; of `stream_options` only `include_usage` is left, in chats and in completions. The
# client gets usage once, at the end, and no warning.
#
# Who bills or shows progress by the usage of each chunk must not put this router in front. Fails if
# the behaviour changes.
set -euo pipefail
dir="$(mktemp -d)"
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install -q vllm-router==0.1.17
"$dir/venv/bin/python" - "$dir/log" <<'END'
import http.server, json, socket, subprocess, sys, threading, time, urllib.error, urllib.request

bodies = []  # of the decode engine
PARAMS = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_block_ids": [[1]],
          "remote_host": "127.0.0.1", "remote_port": 1}


class Engine(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, content, kind):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self):
        self.answer(b'{"object": "list", "data": [{"id": "m", "object": "model"}]}', "application/json")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body.get("stream"):
            bodies.append(body)
            return self.answer(b"data: [DONE]\n\n", "text/event-stream")
        choice = {"index": 0, "message": {"role": "assistant", "content": "a"}, "text": "a", "finish_reason": "length"}
        whole = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice],
                 "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}, "kv_transfer_params": PARAMS}
        self.answer(json.dumps(whole).encode(), "application/json")


def engine():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


port = free_port()
command = [sys.executable, "-m", "vllm_router.launch_router", "--vllm-pd-disaggregation", "--prefill", engine(),
           "--decode", engine(), "--policy", "round_robin", "--host", "127.0.0.1", "--port", port,
           "--prometheus-port", free_port()]
with open(sys.argv[1], "w") as log:
    router = subprocess.Popen(command, stdout=log, stderr=log)
try:
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).read()
            break
        except OSError:
            assert time.monotonic() < deadline and router.poll() is None, open(sys.argv[1]).read()[-2000:]
            time.sleep(0.2)
    asked = {"include_usage": True, "continuous_usage_stats": True}
    extra = {"chat_template_kwargs": {"enable_thinking": False}, "cache_salt": "s", "vllm_xargs": {"a": 1}}
    for path, prompt in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], **extra}),
        ("/v1/completions", {"prompt": "hello", "cache_salt": "s"}),
    ):
        body = {"model": "m", "stream": True, "stream_options": asked, **prompt}
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=30).read()
        got = bodies.pop()
        print(f"vllm-router 0.1.17, {path}: the decode engine gets stream_options {got['stream_options']}")
        assert got["stream_options"] == {"include_usage": True}, got
        assert all(got[name] == value for name, value in prompt.items()), got
finally:
    router.kill()
    router.wait()
END
