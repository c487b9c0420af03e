import logging

from tests.integration.conftest import alone, expected, launcher, model

__all__ = ["alone", "expected", "launcher", "model"]

# It has a line for every request; ours are few, and tell how far we are.
logging.getLogger("httpx").setLevel(logging.WARNING)
