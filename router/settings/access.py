"""Settings of access: admin API, dashboard, API keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import SecretStr

from router.settings.fields import (
    Host,
    LimitsStore,
    ListenPort,
    SettingsGroup,
    is_loopback,
)
from router.settings.secret import Secret, check_credential, check_token

ADMIN_TOKEN = Secret("admin_token", check_token)
UI_TOKEN = Secret("ui_token", check_token)
ENGINE_API_KEY = Secret("engine_api_key", check_credential)


class AdminSettings(SettingsGroup):
    title = "Admin"

    admin_port: ListenPort | None = None
    """Port of the admin API, which adds and drains engines, sets weights of groups and reloads
    settings. Off if not set; 0 takes a free port."""
    admin_host: Host = "127.0.0.1"
    """Bind address of the admin API. Any address other than loopback needs a token."""
    admin_token: Annotated[SecretStr, ADMIN_TOKEN.validator] | None = None
    """Bearer token that the admin API requires. A variable is safer than a flag."""
    admin_token_file: Path | None = None
    """File with the admin token, read at start and at reload."""

    def conflicts(self) -> Iterator[str]:
        has_token = self.admin_token or self.admin_token_file
        if self.admin_port is not None and not has_token and not is_loopback(self.admin_host):
            yield f"--admin-host {self.admin_host} can be reached by others: set --admin-token-file"


class DashboardSettings(SettingsGroup):
    title = "Dashboard"

    ui: bool = False
    """Serve a dashboard at /ui, which shows engines and requests and has a chat."""
    ui_token: Annotated[SecretStr, UI_TOKEN.validator] | None = None
    """Token that the dashboard requires. A variable is safer than a flag."""
    ui_token_file: Path | None = None
    """File with the dashboard's token, read at start."""
    ui_port: ListenPort | None = None
    """Separate port for the dashboard, which the clients' port then does not serve. 0 takes a free
    port."""
    ui_host: Host = "127.0.0.1"
    """Bind address of the dashboard's port."""

    def conflicts(self) -> Iterator[str]:
        if self.ui_port is not None and not self.ui:
            yield "--ui-port needs --ui"


class KeySettings(SettingsGroup):
    title = "API keys"

    api_keys_file: Path | None = None
    """YAML file of the API keys that clients must send, as digests, with owners and limits.
    `disagg-router key` makes an entry; the router watches the file. If not set, requests need no
    key."""
    key_limits_store: LimitsStore | None = None
    """Where usage is counted for the keys' limits: memory (this process), or a Redis URL that
    several routers share. If not set: the conversation store, if that is Redis."""
    engine_api_key: Annotated[SecretStr, ENGINE_API_KEY.validator] | None = None
    """API key that the router sends to engines instead of the client's. A variable is safer than a
    flag."""
    engine_api_key_file: Path | None = None
    """File with the engines' API key, read at start."""
