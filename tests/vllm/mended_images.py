"""Images where torchvision is missing, whose builds do not load beside vLLM's CPU build: vLLM 0.32
takes one function for all LLaVA models from a module that wants it, and needs it for Pixtral only.

Written for PYTHONPATH, as what every interpreter runs first: vLLM looks at a model's module in a
process that has no plugins.
"""

from pathlib import Path

FIRST = """\
import sys
import types

without = types.ModuleType("transformers.models.pixtral.image_processing_pixtral")
without._num_image_tokens = None
sys.modules[without.__name__] = without
"""


def write_mended_images(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "sitecustomize.py").write_text(FIRST)
    return directory
