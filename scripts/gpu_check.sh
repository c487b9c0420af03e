#!/bin/sh
# Check on a machine with a CUDA device that two engines on one GPU answer as one alone, by tokens and
# log-probabilities: our reference engine and vLLM with the options of docs/with-vllm.md, pulled
# and pushed, in the GPU's memory and through host buffers, with prompts of 16,000 tokens. Then measure transfers.
# One command, ten to thirty minutes:
#
#     scripts/gpu_check.sh [--kinds] [--without-vllm] [--without-reference] [--without-figures] [--strict]
#
# With --kinds it runs vLLM alone, with a tiny model of each kind (dense, windows of other block
# sizes, latents, sparse attention, Mamba, delta nets), and says which of them this vLLM cannot run.
#
# It prints a table and leaves ${OUT:-build/gpu}/check.json with the engines' logs beside it. Exit
# status and failures: scripts/gpu_steps.py --help.
#
# What is missing is installed into the environment of $PYTHON, at versions that leave installed
# packages as they are. pip refuses where the system's Python is managed: make a new environment
# (python3 -m venv .venv), also for vLLM, which wants a torch of its own (0.33: 2.14.0) and, for its
# kernels, a C compiler and Python's headers. PYTHON and OUT are absolute, or relative to the checkout.
#
# Without network, put wheels into ./.whl beforehand, on a machine with the same Python (or with
# --python-version 3.12), processor and C library; with vLLM these are gigabytes:
#
#     pip download --only-binary :all: -d .whl nixl==1.5.1 torch msgspec numpy tokenizers safetensors \
#         jinja2 fastapi uvicorn uvloop httptools orjson prometheus_client 'vllm==0.33.0'
#
# Where the GPU machine has torch and vLLM is not wanted, use --no-deps for nixl==1.5.1 and
# nixl-cu13==1.5.1 (nixl-cu12 where torch is for CUDA 12), and leave torch and vLLM out.
#
# This has NOT YET RUN on a GPU. The same steps pass on a CPU:
#
#     DEVICE=cpu scripts/gpu_check.sh --without-vllm
#     DEVICE=cpu PYTHON=<that of scripts/install_vllm> scripts/gpu_check.sh --kinds
set -eu
cd "$(dirname "$0")/.."
DEVICE="${DEVICE:-cuda}"
OUT="${OUT:-build/gpu}"
# All that the steps import, except nixl.
MODULES="torch numpy msgspec tokenizers safetensors jinja2 fastapi starlette pydantic uvicorn uvloop
    httptools orjson prometheus_client"
NIXL=$(sed -n 's/^nixl==//p' constraints.txt)
VLLM="vllm>=0.32,<0.34"

fail() {
    echo "gpu_check: error: $1" >&2
    exit 1
}

if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ ! -x "${VENV:-.venv}/bin/python" ] || PYTHON="${VENV:-.venv}/bin/python"
fi
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "Python 3.11 or newer is needed; set PYTHON"

case " $* " in
*" --help "* | *" -h "*) exec "$PYTHON" scripts/gpu_steps.py --help ;;
esac

missing() {
    "$PYTHON" - "$@" <<'END'
import importlib.util
import sys

print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))
END
}

# Wheels that were carried here say what is wanted; without network an index costs minutes.
pip_install() {
    echo "installing: $*"
    if [ -d .whl ] && "$PYTHON" -m pip install -q --no-index --find-links .whl "$@"; then
        return
    fi
    timeout 1800 "$PYTHON" -m pip install -q --retries 1 "$@"
}

# Not setuptools and the like, which packages want of other versions and nothing here uses.
keep_installed() {
    "$PYTHON" -m pip list --format=freeze --exclude pip --exclude setuptools --exclude wheel \
        >"$OUT/installed.txt" || fail "this Python has no pip; set PYTHON"
}

case " $* " in
*" --without-vllm "*) vllm="" ;;
*) vllm=$(missing vllm) ;;
esac
# A CPU's is another package: scripts/install_vllm.
[ "$DEVICE" != cpu ] || vllm=""

if [ "$DEVICE" != cpu ]; then
    command -v nvidia-smi >/dev/null || fail "no nvidia-smi: this machine has no CUDA device"
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader ||
        fail "nvidia-smi does not answer"
fi

mkdir -p "$OUT"
# shellcheck disable=SC2086  # Lists of names.
packages=$(missing $MODULES)
if [ -n "$packages$vllm" ]; then
    keep_installed
    # shellcheck disable=SC2086
    if [ -z "$vllm" ] || ! pip_install -c "$OUT/installed.txt" $packages "$VLLM"; then
        [ -z "$vllm" ] || echo "gpu_check: error: vLLM cannot be installed, see above" >&2
        [ -z "$packages" ] || pip_install -c "$OUT/installed.txt" $packages ||
            fail "pip could not install $packages: see above, and this file's head for wheels and environments"
    fi
fi
# By itself: its package asks for builds for CUDA 12 and 13, of which one is used and may be there.
if ! "$PYTHON" -c 'import nixl._api' 2>/dev/null; then
    cuda=$("$PYTHON" -c 'import torch; print((torch.version.cuda or "13").partition(".")[0])')
    pip_install --no-deps "nixl==$NIXL" "nixl-cu$cuda==$NIXL" ||
        fail "pip could not install nixl and nixl-cu$cuda, $NIXL: see above, and this file's head"
    "$PYTHON" -c 'import nixl._api' || fail "NIXL does not load"
fi
if [ "$DEVICE" != cpu ]; then
    "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
        fail "torch sees no CUDA device (is it a CPU build?)"
fi

PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH
exec "$PYTHON" scripts/gpu_steps.py --device "$DEVICE" --out "$OUT" "$@"
