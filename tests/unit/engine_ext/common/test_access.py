"""Settings of the side channel's door."""

from pathlib import Path
from typing import Any

import pytest

from engine_ext.common.access import EVERYWHERE, Access, parse_networks
from engine_ext.common.config import ConnectorConfig


def access(**extra: Any) -> Access:
    raw = {"kv_connector": "DisaggConnector", "kv_connector_extra_config": extra}
    return ConnectorConfig.from_kv_transfer_config(raw).access


@pytest.fixture
def secret_file(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef0123456789abcdef\n")
    return str(path)


def test_nothing_said_is_an_open_door() -> None:
    assert access() == Access(None, False, EVERYWHERE)


def test_a_secret_is_required_unless_mixed_is_said(secret_file: str) -> None:
    required = access(side_channel_secret_file=secret_file)
    mixed = access(side_channel_secret_file=secret_file, side_channel_mode="mixed")
    assert required.secret is not None
    assert not required.is_mixed
    assert required == access(side_channel_secret_file=secret_file, side_channel_mode="required")
    assert mixed.is_mixed
    assert mixed.secret == required.secret


def test_space_around_the_secret_does_not_count(secret_file: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("  0123456789abcdef0123456789abcdef")
    assert access(side_channel_secret_file=secret_file).secret == (
        access(side_channel_secret_file=str(other)).secret
    )


def test_a_secret_that_is_missing_short_or_no_path_is_refused_by_key_and_path(
    tmp_path: Path,
) -> None:
    short = tmp_path / "short"
    short.write_text("fifteen bytes..\n\n\n")
    for path, word in (
        (short, "15 bytes"),
        (tmp_path / "none", "No such file"),
        (tmp_path, "not an"),
    ):
        with pytest.raises(ValueError, match=f"side_channel_secret_file: {path}: .*{word}") as one:
            access(side_channel_secret_file=str(path))
        assert "\n" not in str(one.value)
    with pytest.raises(ValueError, match="side_channel_secret_file: 7 is not a path"):
        access(side_channel_secret_file=7)


def test_a_mode_without_a_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="side_channel_mode: mixed needs"):
        access(side_channel_mode="mixed")


@pytest.mark.parametrize(
    ("entries", "inside", "outside"),
    [
        (["10.1.0.0/16"], ["10.1.2.3", "::ffff:10.1.2.3"], ["10.2.0.1", "::1", "name", ""]),
        (["192.0.2.7", "fd00::/8"], ["192.0.2.7", "fd12::1"], ["192.0.2.8", "fe80::1"]),
        (["localhost"], ["127.0.0.1"], ["10.0.0.1", "localhost"]),
        (["0.0.0.0/0"], ["8.8.8.8"], ["::1"]),
        (["10.1.0.0/16"], [], ["::ffff:10.1.0.1%lo]:0;[::ffff:10.2.0.1", "::ffff:10.1.0.1%"]),
    ],
)
def test_an_address_is_inside_or_it_is_not(
    entries: list[str], inside: list[str], outside: list[str]
) -> None:
    peers = access(allowed_peers=entries).peers
    assert all(map(peers.admit, inside))
    assert not any(map(peers.admit, outside))


@pytest.mark.parametrize(
    "value", ["10.0.0.0/8", [], [7], ["10.0.0.1/8"], ["10.0.0.0/33"], ["no.such.host.invalid"]]
)
def test_what_is_no_list_of_networks_is_refused_in_one_line(value: Any) -> None:
    with pytest.raises(ValueError, match="allowed_peers: ") as caught:
        parse_networks("allowed_peers", value)
    assert "\n" not in str(caught.value)
