"""Why a demo ends before it has begun."""

from __future__ import annotations


class DemoError(Exception):
    """The demo cannot go on; the message says why."""


class AbsentError(DemoError):
    """Something is not installed; the message says how to get it."""
