"""Secrets that are given as a value or as a file: the settings NAME and NAME_file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import BaseModel, BeforeValidator, SecretStr

from router.settings.names import SettingsError, flag_of

MIN_KEY_BYTES = 16
PRINTABLE_ASCII = re.compile(r"[\x21-\x7e]{1,4096}")
Check = Callable[[str], object]


class Secret:
    """A secret whose value is the setting `name`, or the content of the file `name`_file.

    `check` raises ValueError for a value that cannot be used; its text must not repeat the value.
    """

    def __init__(self, name: str, check: Check = str) -> None:
        self.name = name
        self.file_name = f"{name}_file"
        self.check = check

    @property
    def validator(self) -> BeforeValidator:
        """Check a value that is given as a setting."""
        return BeforeValidator(self._checked)

    def read(self, settings: BaseModel) -> str | None:
        """Return the secret, or None if neither setting has it.

        Raises SettingsError if the file cannot be read or has no usable value.
        """
        value: SecretStr | None = getattr(settings, self.name)
        if value is not None:
            return value.get_secret_value()
        path: Path | None = getattr(settings, self.file_name)
        if path is None:
            return None
        try:
            text = path.read_text(encoding="utf-8").strip()
            self.check(text)
        except OSError as error:
            reason = error.strerror or str(error)
        except UnicodeDecodeError:
            reason = "not UTF-8"
        except ValueError as error:
            reason = str(error)
        else:
            return text
        raise SettingsError([f"{flag_of(self.file_name)} {path}: {reason}"])

    def conflicts(self, settings: BaseModel) -> Iterator[str]:
        """Yield a line if both settings have a value."""
        if getattr(settings, self.name) and getattr(settings, self.file_name):
            yield f"{flag_of(self.name)} and its -file are both set"

    def _checked(self, value: object) -> object:
        if isinstance(value, str):
            self.check(value)
        return value


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
