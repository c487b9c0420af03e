"""The model of all settings, and how flags, variables and the YAML file are read into it."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from router.settings.access import (
    ADMIN_TOKEN,
    ENGINE_API_KEY,
    UI_TOKEN,
    AdminSettings,
    DashboardSettings,
    KeySettings,
)
from router.settings.conversations import STORE_KEY, STORE_PASSWORD, ConversationSettings
from router.settings.engines import (
    ConnectionSettings,
    DiscoverySettings,
    EngineSettings,
    HealthSettings,
    pairing_problems,
)
from router.settings.fields import SettingsGroup
from router.settings.names import (
    ADMIN_URL,
    PREFIX,
    RENAMED,
    SettingsError,
    flag_of,
    names_of,
    variable_of,
    with_current_names,
)
from router.settings.routing import AdmissionSettings, DecodeFirstSettings, SelectionSettings
from router.settings.server import (
    LogSettings,
    SecuritySettings,
    ServerSettings,
    TimeoutSettings,
    TlsSettings,
)

# A Kubernetes Service called disagg-router puts DISAGG_ROUTER_PORT=tcp://10.0.0.1:8000 into every
# pod of its namespace.
SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://")
SECRETS = (STORE_PASSWORD, STORE_KEY, ADMIN_TOKEN, UI_TOKEN, ENGINE_API_KEY)


class GeneralSettings(SettingsGroup):
    title = "General"

    config: Path | None = None
    """YAML file with any of these settings, under the names of the flags."""


# pydantic collects the fields of the last base first, so the groups are in reverse order here.
class Settings(
    LogSettings,
    SecuritySettings,
    TlsSettings,
    KeySettings,
    DashboardSettings,
    AdminSettings,
    DecodeFirstSettings,
    ConversationSettings,
    ConnectionSettings,
    SelectionSettings,
    HealthSettings,
    AdmissionSettings,
    TimeoutSettings,
    ServerSettings,
    DiscoverySettings,
    EngineSettings,
    GeneralSettings,
    BaseSettings,
):
    """All settings of one router, immutable. Times are seconds, sizes are bytes."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        extra="forbid",
        frozen=True,
        enable_decoding=False,
        hide_input_in_errors=True,
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        variables = VariableSource(settings_cls)
        given = InitSettingsSource(settings_cls, with_current_names(init_settings()))
        path = given().get("config") or variables().get("config")
        content = with_current_names(read_file(Path(path))) if path else {}
        return given, variables, InitSettingsSource(settings_cls, content)

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if problems := [*self._group_conflicts(), *self._conflicts_between_groups()]:
            raise ValueError("\n".join(problems))
        return self

    def _group_conflicts(self) -> Iterator[str]:
        for group in GROUPS:
            yield from group.conflicts(self)
        for secret in SECRETS:
            yield from secret.conflicts(self)

    def _conflicts_between_groups(self) -> Iterator[str]:
        is_discovered = bool(self.engines_file) or self.admin_port is not None
        yield from pairing_problems(
            "prefiller",
            self.prefiller_hosts,
            self.prefiller_ports,
            is_discovered or bool(self.prefiller_dns or self.kubernetes_prefill_selector),
        )
        yield from pairing_problems(
            "decoder",
            self.decoder_hosts,
            self.decoder_ports,
            is_discovered or bool(self.decoder_dns or self.kubernetes_decode_selector),
        )
        if self.workers > 1 and self.conversation_store == "memory":
            yield (
                f"--workers {self.workers} cannot share a conversation store in memory: set "
                "--conversation-store to a Redis URL, or to off"
            )

    def admin_secret(self) -> str | None:
        """Return the admin API's token, if there is one. Raises SettingsError."""
        return ADMIN_TOKEN.read(self)

    def ui_secret(self) -> str | None:
        """Return the dashboard's token, if there is one. Raises SettingsError."""
        return UI_TOKEN.read(self)

    def engine_secret(self) -> str | None:
        """Return the API key for engines, if there is one. Raises SettingsError."""
        return ENGINE_API_KEY.read(self)

    @property
    def limits_store(self) -> str:
        """Where the keys' limits are counted: memory, or a Redis URL."""
        if self.key_limits_store is not None:
            return self.key_limits_store
        is_shared = self.conversation_store not in ("memory", "off")
        return self.conversation_store if is_shared else "memory"

    def limits_password(self) -> str | None:
        """Return the Redis password if both stores are the same. Raises SettingsError."""
        return self.store_password() if self.limits_store == self.conversation_store else None


GROUPS: tuple[type[SettingsGroup], ...] = tuple(
    base for base in reversed(Settings.__bases__) if issubclass(base, SettingsGroup)
)
# Settings whose values are never shown: secrets, and URLs that may contain a password.
SECRET_NAMES = frozenset(("conversation_store", "key_limits_store", *(x.name for x in SECRETS)))


class VariableSource(EnvSettingsSource):
    """The environment without the variables that Kubernetes sets for a Service of our name."""

    def __call__(self) -> dict[str, Any]:
        values = {
            old: os.environ[variable_of(old)] for old in RENAMED if variable_of(old) in os.environ
        }
        for name, value in super().__call__().items():
            if not (isinstance(value, str) and SERVICE_LINK.match(value)):
                values[name] = value
        return with_current_names(values)


def read_file(path: Path) -> dict[str, Any]:
    """Return the YAML file's settings, with underscores in their names. Raises SettingsError."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise SettingsError([f"--config {path}: {reason}"]) from error
    except yaml.YAMLError as error:
        raise SettingsError([f"--config {path}: {' '.join(str(error).split())}"]) from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError([f"--config {path}: not a mapping of settings"])
    settings = {str(key).replace("-", "_"): value for key, value in content.items()}
    if "config" in settings:
        raise SettingsError([f"--config {path}: config: a file cannot name another"])
    return settings


def load(flags: Mapping[str, Any]) -> Settings:
    """Read the settings from `flags`, the environment and the file. Raises SettingsError."""
    try:
        return Settings(**flags)
    except ValidationError as error:
        raise SettingsError(_problems(error, flags)) from None


def _problems(error: ValidationError, flags: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for problem in error.errors(include_url=False, include_context=False):
        message = problem["msg"].removeprefix("Value error, ")
        if problem["loc"]:
            name = str(problem["loc"][0])
            if name not in SECRET_NAMES:
                message += f" (got {textwrap.shorten(repr(problem['input']), 80)})"
            message = f"{_origin(name, flags)}: {message}"
        lines += message.split("\n")
    return list(dict.fromkeys(lines))


def _origin(name: str, flags: Mapping[str, Any]) -> str:
    for given in names_of(name):
        if given in flags:
            return flag_of(given)
    for given in names_of(name):
        if name in Settings.model_fields and variable_of(given) in os.environ:
            return variable_of(given)
    return f"{name.replace('_', '-')} (in the configuration file)"


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the variables with our prefix that are not settings, most likely misspelt."""
    links = (f"{PREFIX}SERVICE_", f"{PREFIX}PORT_")
    known = {ADMIN_URL, *map(variable_of, (*Settings.model_fields, *RENAMED))}
    ours = {name for name in environment if name.startswith(PREFIX) and not name.startswith(links)}
    return sorted(ours - known)


def deprecation_warnings(settings: Settings, flags: Mapping[str, Any]) -> list[str]:
    """Return a line for each deprecated name in `flags`, the environment and the file."""
    content = {} if settings.config is None else read_file(settings.config)
    lines = []
    for old, current in RENAMED.items():
        if old in flags:
            lines.append(f"{flag_of(old)} is deprecated: use {flag_of(current)}")
        if variable_of(old) in os.environ:
            lines.append(f"{variable_of(old)} is deprecated: use {variable_of(current)}")
        if old in content:
            name = current.replace("_", "-")
            lines.append(f"{old} in {settings.config} is deprecated: use {name}")
    return lines
