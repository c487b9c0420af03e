"""One front: these tests are about what lies behind both."""

from __future__ import annotations

import pytest


@pytest.fixture
def front() -> str:
    return "protocol"
