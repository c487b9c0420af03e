"""Checks of what the settings name besides engines: files, secrets, and Redis."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from router.auth.api_keys import Keyring
from router.commands.doctor.checks import Check, Findings, within
from router.common.tls import TlsContext
from router.settings import Settings, SettingsError, flag_of, read_secret

REDIS_TIMEOUT_S = 3.0
SOON_S = 14 * 86400.0
SECRETS = ("admin_token", "ui_token", "engine_api_key", "conversation_store_password")


def check_files(settings: Settings) -> list[Check]:
    """Check the files that the settings name."""
    found = Findings("settings")
    if (path := settings.api_keys_file) is not None:
        try:
            keyring = Keyring(path)
        except ValueError as error:
            cure = "correct the file: `disagg-router key NAME` makes an entry"
            found.fail("API keys", f"{path}: {error}", cure)
        else:
            count = len(keyring.keys)
            found.ok("API keys", f"{path}: {count} key{'' if count == 1 else 's'}")
    _check_tls(found, "TLS", settings.served_tls)
    if settings.engine_ca_file or settings.engine_certfile:
        _check_tls(found, "TLS to engines", settings.engine_tls)
    for name in SECRETS:
        if getattr(settings, f"{name}_file") is None:
            continue
        try:
            read_secret(settings, name)
        except SettingsError as error:
            found.fail(flag_of(name), str(error), "correct the file, or the path")
        else:
            found.ok(flag_of(name), "can be read")
    return found.checks


def _check_tls(found: Findings, name: str, load: Callable[[], TlsContext | None]) -> None:
    try:
        context = load()
    except SettingsError as error:
        found.fail(name, str(error), "name files of one certificate and its key, in PEM")
        return
    if context is None:
        return
    left = None if context.expires_at is None else context.expires_at - time.time()
    if left is None:
        found.ok(name, "the files can be used")
    elif left <= 0:
        found.fail(name, f"the certificate expired {-left / 86400:.0f} days ago", "renew it")
    else:
        soon = ": renew it soon" if left < SOON_S else ""
        found.ok(name, f"the certificate is valid for {left / 86400:.0f} days{soon}")


async def check_redis(settings: Settings) -> list[Check]:
    """Check that the shared stores answer."""
    found = Findings("settings")
    wanted: dict[str, tuple[str, Callable[[], str | None]]] = {}
    store = settings.conversation_store
    if store not in ("memory", "off"):
        wanted["conversation store"] = (
            store,
            lambda: read_secret(settings, "conversation_store_password"),
        )
    if settings.api_keys_file is not None and settings.limits_store not in ("memory", store):
        wanted["key limits store"] = settings.limits_store, settings.limits_password
    for name, (url, password) in wanted.items():
        await _check_redis(found, name, url, password)
    return found.checks


async def _check_redis(
    found: Findings, name: str, url: str, password: Callable[[], str | None]
) -> None:
    from redis.exceptions import RedisClusterException, RedisError  # slow, and seldom needed

    from router.common.redis_backend import create_redis_clients

    cure = f"start Redis, or correct --{name.replace(' ', '-')}"
    try:
        clients = create_redis_clients(url, password(), REDIS_TIMEOUT_S)
    except SettingsError:
        return  # `check_files` reports it
    except ValueError as error:
        found.fail(name, str(error), cure)
        return
    try:
        ping: Awaitable[Any] = clients.main.ping()
        await within(ping, REDIS_TIMEOUT_S)
    except TimeoutError:
        found.fail(name, f"no answer within {REDIS_TIMEOUT_S:g} s", cure)
    except (RedisError, RedisClusterException, OSError) as error:
        # A password in the URL is not part of the error.
        found.fail(name, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", cure)
    else:
        found.ok(name, "answers")
    finally:
        for client in (clients.main, *clients.others):
            try:
                await within(client.aclose(), REDIS_TIMEOUT_S)
            except (RedisError, OSError, TimeoutError):
                continue
