"""What a file of keys may say, and what each thing wrong with it is called."""

import subprocess
import sys
from pathlib import Path

import pytest

from router.auth.api_keys import (
    ApiKey,
    digest_of,
    file_entry,
    new_key,
    parse_keys,
    read_key,
    without_credentials,
)
from router.commands.key import main

A, B = "a" * 64, "b" * 64


def file_of(*lines: str) -> bytes:
    return "\n".join(["keys:", *lines]).encode()


def test_a_key_is_found_by_its_digest_with_all_that_the_file_says_of_it() -> None:
    digest = digest_of(b"sk-1").hex()
    keys = parse_keys(
        file_of(
            f"- {{name: a, sha256: {digest}, tenant: t, requests_per_minute: 60,"
            " tokens_per_minute: 1000, concurrency: 2, models: [m, n]}"
        )
    )
    key = keys[digest_of(b"sk-1")]
    assert key == ApiKey("a", digest, "t", 60, 1000, 2, ("m", "n"))
    assert key.owner == "t"
    assert key.has_limits
    assert key.allows_model("m")
    assert not key.allows_model("other")
    assert not key.allows_model(None)


def test_a_key_of_which_little_is_said_owns_itself_and_may_ask_for_all() -> None:
    (key,) = parse_keys(file_of(f"- {{name: a, sha256: {A}}}")).values()
    assert (key.owner, key.has_limits) == ("a", False)
    assert key.allows_model(None)


def test_json_is_yaml() -> None:
    content = b'{"keys": [{"name": "a", "sha256": "%s"}]}' % A.encode()
    assert [key.name for key in parse_keys(content).values()] == ["a"]


def test_no_key_at_all_may_be_wanted() -> None:
    assert parse_keys(b"keys: []") == {}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "has no list of keys"),
        (b"keys:", "has no list of keys"),
        (b"[]", "has no list of keys"),
        (b"\xff\xfe\x00", "is not YAML"),
        (b"keys: [", "is not YAML"),
        (b"keys: []\nmore: 1", "unknown key 'more': the only key is keys"),
        (file_of(f"- {{name: a, sha256: {A[1:]}}}"), "key 1: "),
        (file_of(f"- {{name: a, sha256: {A.upper()}}}"), "key 1: "),
        (file_of("- {name: a}"), "key 1: "),
        (file_of(f"- {{name: '', sha256: {A}}}"), "key 1: "),
        (file_of(f'- {{name: "a\\r\\nx: y", sha256: {A}}}'), "key 1: "),
        (file_of(f"- {{name: a, sha256: {A}, concurrency: 0}}"), "key 1: "),
        (file_of(f"- {{name: a, sha256: {A}, concurrency: -1}}"), "key 1: "),
        (file_of(f"- {{name: a, sha256: {A}, concurrency: 1.5}}"), "key 1: "),
        (file_of(f"- {{name: a, sha256: {A}, concurency: 1}}"), "key 1: "),
        (file_of(f"- {{name: a, sha256: {A}}}", f"- {{name: b, sha256: {A}}}"), "same sha256"),
        (
            file_of(f"- {{name: a, sha256: {A}}}", f"- {{name: a, sha256: {B}}}"),
            "another key has the name a",
        ),
        (b"keys: &a [*a]", "anchors"),
        (b"keys: " + b"[" * 5000, "nested too deep"),
    ],
)
def test_what_cannot_be_used_is_one_line_that_says_why(content: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        parse_keys(content)
    text = str(caught.value)
    assert why in text
    assert "\n" not in text
    assert A not in text


def test_a_key_that_somebody_pasted_into_the_file_is_not_told_in_its_error() -> None:
    key = new_key()
    for content in (f"keys: [{key}", f"keys:\n- {{name: a, sha256: {key}}}", f"{key}: 1"):
        with pytest.raises(ValueError, match=r".") as caught:
            parse_keys(content.encode())
        assert key not in str(caught.value)


# The command.


@pytest.mark.parametrize("name", ["team-a", "no", "1", "null", "0x1f"])
def test_what_the_command_prints_is_a_line_of_the_file(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--tenant", "1e3"]) == 0
    told = capsys.readouterr()
    key = told.err.strip().rpartition(" ")[2]
    assert key not in told.out
    for begin in (b"", b"keys:\n"):  # a new file needs no first line
        found = parse_keys(begin + told.out.encode())[digest_of(key.encode())]
        assert (found.name, found.owner) == (name, "1e3")


def test_no_two_keys_are_the_same_and_all_have_256_random_bits() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(len(key) == len("sk-disagg-") + 43 for key in keys)


def test_a_name_that_is_none_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["not a name"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(ValueError, match="tenant: begin with a letter"):
        file_entry("a", "not a tenant", "key")


def test_the_command_is_one_of_the_programs(tmp_path: Path) -> None:
    asked = [sys.executable, "-m", "router.commands.cli", "key", "team-a"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("- {name: team-a, sha256: ")
    assert "sk-disagg-" in done.stderr


# What a request shows.


BEARER = (b"authorization", b"Bearer k1")


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ([], None),
        ([(b"x-other", b"k")], None),
        ([BEARER], b"k1"),
        ([(b"authorization", b"bearer   k1 ")], b"k1"),
        ([(b"x-api-key", b"k2")], b"k2"),
        ([BEARER, (b"x-api-key", b"k2")], b"k1"),
        ([(b"x-api-key", b"k2"), BEARER], b"k1"),
        ([BEARER, BEARER], b""),
        ([(b"x-api-key", b"k"), (b"x-api-key", b"k")], b""),
        ([BEARER, BEARER, (b"x-api-key", b"k")], b""),
        ([(b"authorization", b"Basic azE=")], b""),
        ([(b"authorization", b"k1")], b""),
        ([(b"authorization", b"")], b""),
        ([(b"authorization", b"Bearer " + b"k" * 513)], b""),
    ],
)
def test_the_key_that_a_request_shows(
    headers: list[tuple[bytes, bytes]], key: bytes | None
) -> None:
    assert read_key(headers) == key
    assert not {b"authorization", b"x-api-key"} & {name for name, _ in without_credentials(headers)}
