#!/bin/sh
# On a machine with a CUDA device: two engines on one GPU answer as one alone, in the GPU's memory and
# through host buffers, with prompts of 16,000 tokens, our reference engine and vLLM where it is
# installed; then what transfers take, against a copy within the device and beside a busy thread of
# Python. One command, ten to thirty minutes; a table, ${OUT:-build/gpu}/check.json, and what each step
# answered in answers.txt beside it:
#
#     scripts/gpu_check.sh [--without-vllm]
#
# Without network, put the wheels that are missing into ./.whl beforehand, on a machine with the
# same Python: pip download -d .whl -c constraints.txt nixl msgspec tokenizers (and vllm, for vLLM)
#
# NOT YET RUN on a GPU: none was at hand when this was written. The same steps pass on a CPU:
#
#     DEVICE=cpu scripts/gpu_check.sh
set -eu
cd "$(dirname "$0")/.."
DEVICE="${DEVICE:-cuda}"
OUT="${OUT:-build/gpu}"
MODULES="nixl msgspec numpy torch tokenizers safetensors jinja2 fastapi uvicorn uvloop httptools orjson"

fail() {
    echo "gpu_check: error: $1" >&2
    exit 1
}

if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ -x "${VENV:-.venv}/bin/python" ] && PYTHON="${VENV:-.venv}/bin/python"
fi
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "Python 3.11 or newer is needed; set PYTHON"

missing() {
    "$PYTHON" - $MODULES <<'END'
import importlib.util
import sys

absent = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
print(" ".join(absent))
END
}

if [ "$DEVICE" != cpu ]; then
    command -v nvidia-smi >/dev/null || fail "no nvidia-smi: this machine has no CUDA device"
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader ||
        fail "nvidia-smi does not answer"
fi

packages=$(missing)
if [ -n "$packages" ]; then
    echo "installing: $packages"
    # shellcheck disable=SC2086  # A list of names.
    timeout 300 "$PYTHON" -m pip install -q -c constraints.txt --retries 1 $packages ||
        "$PYTHON" -m pip install -q --no-index --find-links .whl $packages ||
        fail "pip has no network, and ./.whl does not hold: $packages (see this file's head)"
fi
if [ "$DEVICE" != cpu ]; then
    "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
        fail "torch sees no CUDA device (is it a CPU build?)"
fi

PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH
exec "$PYTHON" scripts/gpu_steps.py --device "$DEVICE" --out "$OUT" "$@"
