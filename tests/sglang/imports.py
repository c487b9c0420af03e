"""Lets SGLang be imported without torchvision, whose CPU build is in no package index."""

import sys
import types

import transformers.utils.import_utils as installed

installed.is_torchvision_available()


class Torchvision(types.ModuleType):
    """Has every class that anybody asks for; only models of images use them."""

    def __getattr__(self, name: str) -> object:
        if name == "__path__":
            return ()  # it is a package
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


for part in ("", ".io", ".transforms", ".transforms.functional"):
    sys.modules[f"torchvision{part}"] = Torchvision(f"torchvision{part}")
