"""Secrets that are given as a value or as a file: the settings NAME and NAME_file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, SecretStr

from router.settings.fields import SettingsError, flag_of

MIN_KEY_BYTES = 16
PRINTABLE_ASCII = re.compile(r"[\x21-\x7e]{1,4096}")


def check_credential(text: str) -> None:
    """Raise ValueError unless `text` can be sent in an HTTP header."""
    if not PRINTABLE_ASCII.fullmatch(text):
        raise ValueError("not a key: ASCII without spaces")


def check_token(text: str) -> None:
    """Raise ValueError unless `text` is a bearer token that is long enough."""
    if not PRINTABLE_ASCII.fullmatch(text):
        raise ValueError("not a token: ASCII without spaces, as from openssl rand -hex 32")
    if len(text) < MIN_KEY_BYTES:
        raise ValueError(
            f"too short with {len(text)} characters: at least {MIN_KEY_BYTES}, better those of "
            "openssl rand -hex 32"
        )


def parse_signing_keys(text: str) -> list[bytes]:
    """Return the keys in `text`, one a line: the first one signs, all verify. Raise ValueError."""
    keys = [line.strip().encode() for line in text.splitlines() if line.strip()]
    if not keys:
        raise ValueError("no key: give one line of text, as from openssl rand -base64 32")
    for number, key in enumerate(keys, 1):
        if len(key) < MIN_KEY_BYTES:
            raise ValueError(
                f"key {number} is too short with {len(key)} bytes: at least {MIN_KEY_BYTES}, "
                "better those of openssl rand -base64 32"
            )
    return keys


# The secrets, and what raises ValueError for a value that cannot be used, without repeating it.
SECRETS: dict[str, Callable[[str], object]] = {
    "conversation_store_password": str,
    "conversation_store_key": parse_signing_keys,
    "admin_token": check_token,
    "ui_token": check_token,
    "engine_api_key": check_credential,
}


def read_secret(settings: BaseModel, name: str) -> str | None:
    """Return the secret `name`, or None if neither setting has it.

    Raises SettingsError if the file cannot be read or has no usable value.
    """
    value: SecretStr | None = getattr(settings, name)
    if value is not None:
        return value.get_secret_value()
    path: Path | None = getattr(settings, f"{name}_file")
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8").strip()
        SECRETS[name](text)
    except OSError as error:
        reason = error.strerror or str(error)
    except UnicodeDecodeError:
        reason = "not UTF-8"
    except ValueError as error:
        reason = str(error)
    else:
        return text
    raise SettingsError([f"{flag_of(name)}-file {path}: {reason}"])
