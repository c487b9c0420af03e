"""Starts a server of SGLang 0.5.23 on a CPU, where it does not run as it is:

    python sglang_on_cpu.py MODEL [OPTION...]     MODEL is made first if it does not exist

What SGLang takes for granted is replaced: kernels that it imports from vllm and never calls here,
CUDA's registered host memory and its events, and NIXL's name for the memory of accelerators.
"""

import runpy
import sys
import types
from pathlib import Path
from typing import Any

import imports  # type: ignore[import-not-found]  # noqa: F401
import nixl_cu12._api as nixl
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast


class Event:
    """Replaces torch.cuda.Event. Work on a CPU is complete when the event is recorded."""

    def __init__(self, *_: object, **__: object) -> None: ...
    def record(self, *_: object) -> None: ...
    def wait(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


class CudaRuntime:
    """Every function succeeds and does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 0


def with_host_memory(method: Any) -> Any:
    def call(self: Any, *given: object) -> Any:
        kinds = ("DRAM" if isinstance(one, str) and one == "VRAM" else one for one in given)
        return method(self, *kinds)

    return call


for name in ("get_xfer_descs", "get_reg_descs", "register_memory", "prep_xfer_dlist"):
    setattr(nixl.nixl_agent, name, with_host_memory(getattr(nixl.nixl_agent, name)))
torch.cuda.Event = Event  # type: ignore[assignment,misc]
torch.cuda.cudart = CudaRuntime
kernels = types.ModuleType("vllm._custom_ops")
kernels.rotary_embedding = None  # type: ignore[attr-defined]
sys.modules |= {"vllm": types.ModuleType("vllm"), "vllm._custom_ops": kernels}


def make_model(path: str) -> None:
    """Write the configuration and the tokenizer of a tiny model: a token is a byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:254]
    vocabulary = {one: number for number, one in enumerate([*letters, "<s>", "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    template = "{% for one in messages %}{{one['role']}}: {{one['content']}} {% endfor %}"
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=template
    ).save_pretrained(path)
    LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=256,
        max_position_embeddings=512,
        bos_token_id=254,
        eos_token_id=255,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(path)


if __name__ == "__main__":  # the scheduler's process imports this module too
    model, *options = sys.argv[1:]
    if not Path(model).exists():
        make_model(model)
    small = "--load-format dummy --random-seed 1 --mem-fraction-static 0.1 --max-total-tokens 2048"
    on_cpu = "--device cpu --attention-backend torch_native --page-size 16"
    no_backup = "--disaggregation-decode-retraction-backup none"  # it wants 10 GiB of free memory
    sys.argv[1:] = ["--model-path", model, *small.split(), *on_cpu.split()]
    sys.argv += [*no_backup.split(), *options]
    runpy.run_module("sglang.launch_server", run_name="__main__")
