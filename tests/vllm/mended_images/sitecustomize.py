"""Images where torchvision is missing, whose builds do not load beside vLLM's CPU build: vLLM 0.32
takes one function for all LLaVA models from a module that wants it, and needs it for Pixtral only.

A plugin for vLLM's processes, which are forked. vLLM looks at a model's module in a process without
plugins: every interpreter with this folder in PYTHONPATH runs this file first.
"""

import sys
import types


def register() -> None:
    without = types.ModuleType("transformers.models.pixtral.image_processing_pixtral")
    vars(without)["_num_image_tokens"] = None
    sys.modules[without.__name__] = without


if __name__ == "sitecustomize":
    register()
