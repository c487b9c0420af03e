"""Why a demo ends before it has begun."""

from __future__ import annotations


class DemoError(Exception):
    """The demo cannot go on; the message says why."""
