"""The model of all settings, and how flags, variables and the YAML file are read into it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from inspect import getdoc
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin, get_type_hints

import yaml
from pydantic import (
    ByteSize,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from router.common.did_you_mean import did_you_mean
from router.settings import engines, routing, server
from router.settings.fields import (
    ADMIN_URL,
    PREFIX,
    SettingsError,
    SettingsGroup,
    flag_of,
    is_loopback,
    variable_of,
)
from router.settings.problems import describe
from router.settings.secret import SECRETS, read_secret

# Deprecated names of settings and the current ones. A deprecated name works as flag, as variable
# and in the YAML file for one release.
RENAMED = {"scatter": "hedged_decoders"}
# A Kubernetes Service called disagg-router puts DISAGG_ROUTER_PORT=tcp://10.0.0.1:8000 into every
# pod of its namespace.
SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://")
UNITS = {"SECONDS": "s", "TOKENS": "tokens"}
METAVARS: dict[Any, str] = {int: "N", Path: "FILE", ByteSize: "SIZE", SecretStr: "SECRET"}


class GeneralSettings(SettingsGroup):
    """General

    config: YAML file with any of these settings, under the names of the flags.
    """

    config: Path | None = None


# pydantic collects the fields of the last base first, so the groups are in reverse order here.
class Settings(
    server.LogSettings,
    server.SecuritySettings,
    server.TlsSettings,
    server.KeySettings,
    server.DashboardSettings,
    server.AdminSettings,
    routing.DecodeFirstSettings,
    routing.ConversationSettings,
    engines.ConnectionSettings,
    routing.SelectionSettings,
    engines.HealthSettings,
    routing.AdmissionSettings,
    server.TimeoutSettings,
    server.ServerSettings,
    engines.DiscoverySettings,
    engines.EngineSettings,
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

    @field_validator(*SECRETS, mode="before")
    @classmethod
    def _check_secret(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, str):
            SECRETS[str(info.field_name)](value)
        return value

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if problems := list(self._conflicts()):
            raise ValueError("\n".join(problems))
        return self

    def _conflicts(self) -> Iterator[str]:
        for group in GROUPS:
            yield from group.conflicts(self)
        for name in SECRETS:
            if getattr(self, name) and getattr(self, f"{name}_file"):
                yield f"{flag_of(name)} and its -file are both set"
        is_discovered = bool(self.engines_file) or self.admin_port is not None
        prefill_found = is_discovered or self.prefiller_dns or self.kubernetes_prefill_selector
        yield from self.prefill_engines.problems(is_required=not prefill_found)
        decode_found = is_discovered or self.decoder_dns or self.kubernetes_decode_selector
        yield from self.decode_engines.problems(is_required=not decode_found)
        yield from self._own_address()
        if self.workers > 1 and self.conversation_store == "memory":
            yield (
                f"--workers {self.workers} cannot share a conversation store in memory: set "
                "--conversation-store to a Redis URL, or to off"
            )

    def _own_address(self) -> Iterator[str]:
        """Yield a line if an engine is this router itself: each request would come back to it."""
        is_local = self.host in ("0.0.0.0", "::") or is_loopback(self.host)
        for flag, addresses in (("prefill", self.prefillers), ("decode", self.decoders)):
            for engine in addresses:
                is_here = engine.host == self.host or (is_local and is_loopback(engine.host))
                if is_here and engine.port == self.port:
                    yield f"--{flag} {engine} is the address of this router (--port {self.port})"

    @property
    def limits_store(self) -> str:
        """Where the keys' limits are counted: memory, or a Redis URL."""
        if self.key_limits_store is not None:
            return self.key_limits_store
        is_shared = self.conversation_store not in ("memory", "off")
        return self.conversation_store if is_shared else "memory"

    def limits_password(self) -> str | None:
        """Return the Redis password if both stores are the same. Raises SettingsError."""
        if self.limits_store != self.conversation_store:
            return None
        return read_secret(self, "conversation_store_password")


GROUPS: tuple[type[SettingsGroup], ...] = tuple(
    base for base in reversed(Settings.__bases__) if issubclass(base, SettingsGroup)
)
# Settings whose values are never shown: secrets, and URLs that may contain a password.
SECRET_NAMES = frozenset(("conversation_store", "key_limits_store", *SECRETS))


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
        units = {name: unit_of(name) for name in Settings.model_fields}
        raise SettingsError(describe(error, flags, units, RENAMED, SECRET_NAMES)) from None


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the variables with our prefix that are not settings, with the closest setting."""
    links = (f"{PREFIX}SERVICE_", f"{PREFIX}PORT_")
    known = {ADMIN_URL, *map(variable_of, (*Settings.model_fields, *RENAMED))}
    ours = {name for name in environment if name.startswith(PREFIX) and not name.startswith(links)}
    return [f"{name} is not a setting{did_you_mean(name, known)}" for name in sorted(ours - known)]


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


def with_current_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with deprecated names replaced. A value under the current name wins."""
    renamed = {RENAMED[name]: value for name, value in values.items() if name in RENAMED}
    return renamed | {name: value for name, value in values.items() if name not in RENAMED}


@cache
def _group_documents() -> dict[str, tuple[str, str]]:
    """Return the title of the group and the help text of each setting."""
    found = {}
    for group in GROUPS:
        title, *entries = re.split(r"^(\w+): ", getdoc(group) or "", flags=re.MULTILINE)
        texts = dict(zip(entries[::2], entries[1::2], strict=True))
        for name in group.model_fields:
            found[name] = title.strip(), " ".join(texts.get(name, "").split())
    return found


def group_title(name: str) -> str:
    """Return the title of the group to which the setting `name` belongs."""
    return _group_documents()[name][0]


def description_of(name: str) -> str:
    return _group_documents()[name][1]


def metavar_of(name: str) -> str:
    """Return what stands for the value of the setting `name` in `--help`."""
    return _metavar(_annotations()[name])


@cache
def _annotations() -> dict[str, Any]:
    return get_type_hints(Settings, include_extras=True)


def unit_of(name: str) -> str:
    """Return the unit of the setting `name`, empty if it has none or its values are written with
    it."""
    return UNITS.get(metavar_of(name), "")


def _metavar(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        plain, *metadata = get_args(annotation)
        return next((one for one in metadata if isinstance(one, str)), _metavar(plain))
    if get_origin(annotation) is Literal:
        return f"{{{','.join(get_args(annotation))}}}"
    if annotation in METAVARS:
        return METAVARS[annotation]
    return next(filter(None, map(_metavar, get_args(annotation))), "")


def value_text(value: object) -> str:
    """Return the value of a setting as a person would write it, empty for None."""
    if isinstance(value, ByteSize):
        return value.human_readable().replace(".0", "")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return "" if value is None else str(value)


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
