"""Settings in force: nobody learns a secret from them."""

from pathlib import Path

import pytest
from pydantic import SecretStr

from router.settings import SECRET_NAMES, Settings, SettingsError, load, read_secret
from router.ui.hub import HIDDEN, visible_settings
from tests.unit.router.test_settings import ENGINES

SECRET = "hunter2-hunter2-hunter2"


def test_no_secret_is_in_them() -> None:
    given = {name: SecretStr(SECRET) for name in SECRET_NAMES if name != "conversation_store"}
    url = f"redis://user:{SECRET}@far:6379/0"
    settings = load(ENGINES).model_copy(update={**given, "conversation_store": url})
    told = {one["flag"]: one for one in visible_settings(settings)}
    assert SECRET not in str(told)
    assert "far" not in told["--conversation-store"]["value"]
    assert told["--conversation-store"]["value"].startswith("redis://")
    for flag in ("--admin-token", "--ui-token", "--conversation-store-key"):
        assert told[flag]["value"] == HIDDEN


def test_every_secret_type_is_named_a_secret() -> None:
    for name, field in Settings.model_fields.items():
        assert ("SecretStr" in str(field.annotation)) <= (name in SECRET_NAMES), name


def test_values_are_as_a_person_would_write_them() -> None:
    told = {
        one["flag"]: one
        for one in visible_settings(load({**ENGINES, "request_timeout": 7, "ui": True}))
    }
    assert told["--request-timeout"]["value"] == "7 s"
    assert not told["--request-timeout"]["is_default"]
    assert told["--ui"]["value"] == "on"
    assert told["--conversation-store"]["value"] == "memory"
    assert told["--admin-token"]["value"] == ""
    assert told["--admin-token"]["is_default"]


def test_a_token_comes_from_a_setting_or_a_file_but_not_from_both(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{SECRET}\n")
    assert read_secret(load(ENGINES), "ui_token") is None
    assert read_secret(load({**ENGINES, "ui_token": SECRET}), "ui_token") == SECRET
    assert read_secret(load({**ENGINES, "ui_token_file": file}), "ui_token") == SECRET
    with pytest.raises(SettingsError, match="both set"):
        load({**ENGINES, "ui_token": SECRET, "ui_token_file": file})
    file.write_text("hunter2")
    with pytest.raises(SettingsError, match="too short") as error:
        read_secret(load({**ENGINES, "ui_token_file": file}), "ui_token")
    assert "hunter2" not in str(error.value)
