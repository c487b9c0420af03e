from tests.integration.conftest import alone, expected, launcher, model

__all__ = ["alone", "expected", "launcher", "model"]
