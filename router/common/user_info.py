"""Hides the user and the password of a URL in a text that quotes the URL."""

from __future__ import annotations

import re

# Up to the last "@": a password may contain anything.
USER_INFO = re.compile(r"//.*@", re.DOTALL)


def without_user_info(text: str) -> str:
    return USER_INFO.sub("//***@", text)
