"""Renders settings as the YAML file that would set them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ByteSize, SecretStr

from router.settings.model import SECRET_NAMES, Settings, group_title


def as_yaml(settings: Settings) -> str:
    """Return the settings in force as a file for `--config`. Secrets are comments without values;
    so are settings without a value."""
    lines: list[str] = []
    title = ""
    for name in Settings.model_fields:
        if name == "config":  # a file cannot name another
            continue
        if group_title(name) != title:
            title = group_title(name)
            lines.append(f"# {title}")
        value = getattr(settings, name)
        key = name.replace("_", "-")
        if value is None:
            lines.append(f"# {key}: not set")
        elif isinstance(value, SecretStr) or (name in SECRET_NAMES and "://" in value):
            lines.append(f"# {key}: set, but not shown")
        else:
            lines.append(yaml.safe_dump({key: _plain(value)}, sort_keys=False).rstrip())
    return "\n".join(lines) + "\n"


def _plain(value: object) -> Any:
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Path):
        return str(value)
    return int(value) if isinstance(value, ByteSize) else value
