"""The settings in force, for people: nothing that is secret is in it, only whether it is set."""

from __future__ import annotations

from pydantic import BaseModel, SecretStr

from router.settings import SECRET_NAMES, Settings, flag_of, group_title

HIDDEN = "set, not shown"
STORES = ("memory", "off")


class VisibleSetting(BaseModel):
    group: str
    flag: str
    value: str
    is_default: bool


def visible_settings(settings: Settings) -> list[VisibleSetting]:
    return [
        VisibleSetting(
            group=group_title(name),
            flag=flag_of(name),
            value=_text(name, value := getattr(settings, name)),
            is_default=value == field.default,
        )
        for name, field in Settings.model_fields.items()
    ]


def _text(name: str, value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, SecretStr) or (name in SECRET_NAMES and value not in STORES):
        # A store's URL may have a password; its scheme says which kind it is.
        scheme, found, _ = value.partition("://") if isinstance(value, str) else ("", "", "")
        return f"{scheme}://… ({HIDDEN})" if found else HIDDEN
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)
