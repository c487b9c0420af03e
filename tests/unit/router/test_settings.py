"""Flags, variables and file: one model, one order, one line per problem."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.commands.cli import main, parser
from router.server.app import with_store_keys
from router.settings import (
    RENAMED,
    Address,
    Settings,
    SettingsError,
    deprecation_warnings,
    description_of,
    group_title,
    load,
    read_secret,
    unit_of,
    unknown_variables,
)

ENGINES = {
    "prefiller_hosts": ["p"],
    "prefiller_ports": ["8100"],
    "decoder_hosts": ["d"],
    "decoder_ports": ["8200"],
}
FLAGS = [
    "--prefiller-hosts=p",
    "--prefiller-ports=8100",
    "--decoder-hosts=d",
    "--decoder-ports=8200",
]


def parsed(line: str) -> Settings:
    return load(vars(parser().parse_args(line.split())))


def problems(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """What a command line is refused with, at exit code 2."""
    try:
        code = main(arguments)
    except SystemExit as left:
        code = int(str(left.code))
    assert code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


@pytest.mark.parametrize(
    "hosts",
    [
        "--prefiller-hosts a b",
        "--prefiller-hosts a,b",
        "--prefiller-hosts a --prefiller-hosts b",
        '--prefiller-hosts ["a","b"]',
    ],
)
@pytest.mark.parametrize("ports", ["--prefiller-ports 1 2", "--prefiller-ports 1,2"])
def test_lists_may_be_given_in_every_usual_way(hosts: str, ports: str) -> None:
    settings = parsed(f"{hosts} {ports} --decoder-hosts d --decoder-ports 3")
    assert settings.prefillers == (Address("a", 1), Address("b", 2))
    assert settings.decoders == (Address("d", 3),)


def test_one_host_may_be_called_a_host() -> None:
    """As in the commands of NIXL's users: one prefiller, one decoder."""
    settings = parsed(
        "--prefiller-host p --prefiller-port 1 --decoder-host d --decoder-port 2 --decoder-host e"
    )
    assert settings.prefillers == (Address("p", 1),)
    assert settings.decoders == (Address("d", 2), Address("e", 2))


def test_an_engine_is_given_as_a_url_or_as_host_and_port() -> None:
    settings = parsed(
        "--prefill http://p:1 https://q:2/ [::1]:3 --decode d:4 --decoder-hosts e:5 f "
        "--decoder-ports 6 7"
    )
    assert list(map(str, settings.prefillers)) == ["p:1", "q:2", "[::1]:3"]
    assert list(map(str, settings.decoders)) == ["d:4", "e:5", "f:6", "f:7"]
    assert list(map(str, settings.over_tls)) == ["q:2"]


@pytest.mark.parametrize(
    ("given", "host", "written"),
    [
        ("localhost", "localhost", "localhost:8100"),
        ("10.0.0.1", "10.0.0.1", "10.0.0.1:8100"),
        ("[::1]", "::1", "[::1]:8100"),
        ("2001:db8::1", "2001:db8::1", "[2001:db8::1]:8100"),
        ("fe80::1%eth0.2", "fe80::1%eth0.2", "[fe80::1%eth0.2]:8100"),
        ("my_pod-0.svc.cluster.local", "my_pod-0.svc.cluster.local", None),
    ],
)
def test_a_host_is_a_name_or_an_address(given: str, host: str, written: str | None) -> None:
    (address,) = load(ENGINES | {"prefiller_hosts": [given]}).prefillers
    assert address.host == host
    assert written is None or str(address) == written


@pytest.mark.parametrize(
    ("given", "engines", "over_tls"),
    [
        ("http://a b", ["a:1", "b:1"], []),
        ("http://a:7/ HTTP://b", ["a:7", "b:1"], []),
        ("https://a http://[::1]:7", ["[::1]:7", "a:1"], ["a:1"]),
        ("https://a:7 b", ["a:7", "b:1"], ["a:7"]),
    ],
)
def test_hosts_of_engines_may_be_urls(given: str, engines: list[str], over_tls: list[str]) -> None:
    settings = parsed(f"--prefiller-hosts {given} --prefiller-ports 1 --decode d:2")
    assert sorted(map(str, settings.prefillers)) == engines
    assert list(map(str, settings.over_tls)) == over_tls


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--prefiller-hosts ftp://a", "must be HOST or HOST:PORT"),
        ("--prefiller-hosts http://", "must be HOST or HOST:PORT"),
        ("--prefiller-hosts http://a:8100/v1", "must be HOST or HOST:PORT"),
        ("--prefiller-hosts http://a:99999", "must be HOST or HOST:PORT"),
        ("--prefiller-hosts http://a", "--prefiller-ports is missing"),
        ("--prefiller-hosts http://a:1 --prefiller-ports 1", "has a port already"),
        ("--prefiller-ports 8100", "--prefiller-hosts is missing"),
        ("--prefiller-hosts a --prefiller-ports 80000", "at most 65535"),
        ("--prefiller-hosts", "expected at least one argument"),
    ],
)
def test_hosts_that_cannot_be_used_are_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: str, complaint: str
) -> None:
    (line,) = problems(capsys, "--decode", "d:2", *arguments.split())
    assert line.startswith("disagg-router: error: ")
    assert complaint in line


def test_common_help_has_the_flags_of_vllms_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for flag in ("--prefiller-hosts", "--prefiller-ports", "--decoder-hosts", "--decoder-ports"):
        assert text.count(flag) >= 2  # the option, and the example


@pytest.mark.parametrize(
    "host",
    [
        "http://",
        "a:0",
        "a:x",
        "a/b",
        "-a",
        "",
        "a b;c",
        "[::1",
        "1::2::3",
        '::1%a"b',
        "::1%a\r\nb: c",
    ],
)
def test_anything_else_is_no_host(host: str) -> None:
    with pytest.raises(SettingsError):
        load(ENGINES | {"prefiller_hosts": [host]})


@given(st.text())
def test_no_text_breaks_the_parsing_of_lists(text: str) -> None:
    try:
        settings = load(ENGINES | {"prefiller_hosts": text})
    except SettingsError as error:
        lines = error.problems
    else:
        lines = list(map(str, settings.prefillers))
    assert lines
    assert all("\n" not in line for line in lines)


def test_a_flag_wins_over_a_variable_over_the_file_over_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "router.yaml"
    file.write_text(
        "port: 1\nkeep-alive-timeout: 2\nlog_level: error\nprefiller-hosts: [x, y]\n"
        "prefiller-ports: 5\ndecoder-hosts: d\ndecoder-ports: [8200]\naccess-log: false\n"
    )
    monkeypatch.setenv("DISAGG_ROUTER_CONFIG", str(file))
    monkeypatch.setenv("DISAGG_ROUTER_PORT", "3")
    monkeypatch.setenv("DISAGG_ROUTER_LOG_LEVEL", "warning")
    monkeypatch.setenv("DISAGG_ROUTER_MAX_BODY_SIZE", "2MiB")
    settings = parsed("--log-level DEBUG")
    assert settings.log_level == "debug"
    assert settings.port == 3
    assert settings.keep_alive_timeout == 2
    assert settings.host == "127.0.0.1"
    assert settings.max_body_size == 2 * 1024 * 1024
    assert settings.prefillers == (Address("x", 5), Address("y", 5))
    assert settings.access_log is False


@pytest.mark.parametrize("text", ["a b", "a,b", "a, b", '["a", "b"]'])
def test_lists_in_variables(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("DISAGG_ROUTER_PREFILLER_HOSTS", text)
    flags = {name: value for name, value in ENGINES.items() if name != "prefiller_hosts"}
    assert load(flags).prefiller_hosts == ("a", "b")


@pytest.mark.parametrize(
    ("given_patterns", "expected"),
    [
        ("Today is, *", ("Today is, *",)),
        ('["a b*", "c,"]', ("a b*", "c,")),
        (['["a b*", "c,"]'], ("a b*", "c,")),
        (["a b*", "c,"], ("a b*", "c,")),
        ("", ()),
        ([], ()),
        ("[]", ()),
    ],
)
def test_patterns_keep_their_spaces_and_commas(
    given_patterns: object, expected: tuple[str, ...]
) -> None:
    settings = load({**ENGINES, "changing_prompt_lines": given_patterns})
    assert settings.changing_prompt_lines == expected


@pytest.mark.parametrize("pattern", ["*", " a", "*a", "a\nb", "a" * 201, "[a", ["a"] * 33])
def test_a_pattern_that_would_match_any_line_is_refused(pattern: object) -> None:
    with pytest.raises(SettingsError, match="changing-prompt-lines"):
        load({**ENGINES, "changing_prompt_lines": pattern})


def test_the_variables_of_a_kubernetes_service_of_our_name_are_not_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DISAGG_ROUTER_PORT", "tcp://10.0.0.1:8000")
    monkeypatch.setenv("DISAGG_ROUTER_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("DISAGG_ROUTER_PORT_8000_TCP_ADDR", "10.0.0.1")
    assert load(ENGINES).port == 8000


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--port x", "--port"),
        ("--port 70000", "--port"),
        ("--port", "--port"),
        ("--prefill-timeout nan", "--prefill-timeout"),
        ("--prefill-timeout inf", "--prefill-timeout"),
        ("--prefill-timeout 0", "must be more than 0 s"),
        ("--prefill-timeout x", "must be a number of seconds"),
        ("--request-timeout 1e12", "must be at most 31622400 s"),
        ("--host-cache-tokens=-1", "must be at least 0 tokens"),
        ("--host-cache-tokens 1.5", "must be a whole number of tokens"),
        ("--stream-heartbeat 0.01", "at least 0.1 s, or 0 for none"),
        ("--max-body-size x", "--max-body-size: must be a number of bytes"),
        ("--workers 1000", "must be at most 256 (got"),
        ("--log-format xml", "--log-format"),
        ("--decoder-hosts e f --decoder-ports 1", "--decoder-ports"),
        ("--decoder-hosts e:1 --prefill a", "HOST:PORT"),
        ("--prefill p:8100", "twice"),
        ("--prefiller-hosts p", "twice"),
        ("--prot 1", "did you mean --port?"),
        ("--log-level inof", "must be debug, info, warning or error; did you mean info?"),
        ("--no-such-flag", "--no-such-flag"),
        ("--por 1", "--por"),
        ("strat", "strat"),
        ("--config /nowhere.yaml", "/nowhere.yaml"),
        ("--conversation-store reddis://:pa55@host", "--conversation-store"),
        ("--conversation-store redis://:pa55@host:port", "--conversation-store"),
        ("--conversation-store redis+sentinel://:pa55@host", "master"),
        ("--conversation-store redis://:pa55#pa55@host", "%23"),
        ("--prefill http://u:pa55,pa55'pa55@h:8100", "--prefill"),
        ("--conversation-store redis://h --conversation-store-password-file /no", "/no"),
        ("--conversation-store-key pa55", "at least 16"),
        (["--conversation-store-key", "a pa55 of 16 bytes\npa55"], "key 2 is too short"),
        ("--conversation-store-key=", "openssl rand"),
        ("--conversation-store redis://h --conversation-store-key-file /no", "/no"),
        ("--conversation-store=redis://h --conversation-store-key-file=/no --workers=2", "/no"),
        ("--conversation-store=redis://h --conversation-store-key-file=/dev/null", "no key"),
        (["--conversation-ids", "a b!c"], "--conversation-ids"),
        ("--decode-first-threshold 1.5", "--decode-first-threshold"),
        ("--affinity-load-factor 0.5", "--affinity-load-factor"),
    ],
)
def test_a_bad_value_is_one_line_without_secrets_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: str | list[str], complaint: str
) -> None:
    words = arguments.split() if isinstance(arguments, str) else arguments
    (line,) = problems(capsys, *FLAGS, "--port", "0", *words)
    assert line.startswith("disagg-router: error: ")
    assert complaint in line
    assert "pa55" not in line


def test_defaults_in_help_have_their_unit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help-all"])
    text = " ".join(capsys.readouterr().out.split())
    for default in ("--prefill-timeout SECONDS", "600 s)", "16384 tokens)", "64MiB)", "0 s)"):
        assert default in text
    without = [name for name in Settings.model_fields if name.endswith("_tokens")]
    assert {unit_of(name) for name in without} == {"tokens"}


@pytest.mark.parametrize(
    ("host", "engine", "is_own"),
    [
        ("127.0.0.1", "localhost:8000", True),
        ("0.0.0.0", "127.0.0.1:8000", True),
        ("10.0.0.5", "10.0.0.5:8000", True),
        ("10.0.0.5", "127.0.0.1:8000", False),
        ("0.0.0.0", "10.0.0.9:8000", False),
        ("127.0.0.1", "127.0.0.1:8001", False),
    ],
)
def test_router_is_no_engine_of_its_own(
    capsys: pytest.CaptureFixture[str], host: str, engine: str, is_own: bool
) -> None:
    arguments = ["--host", host, "--prefill", "p:1", "--decode", engine]
    if is_own:
        (line,) = problems(capsys, *arguments)
        assert line.endswith("is the address of this router (--port 8000)")
    else:
        assert main([*arguments, "--check"]) == 0


def test_every_problem_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    lines = problems(capsys, *FLAGS, "--port", "x", "--host", "a b", "--log-level", "loud")
    assert [line.split(": ")[2] for line in lines] == ["--host", "--port", "--log-level"]


def test_no_engines_are_a_problem_each(capsys: pytest.CaptureFixture[str]) -> None:
    lines = problems(capsys)
    assert len(lines) == 2
    assert "--prefill http://HOST:PORT" in lines[0]
    assert "--decode http://HOST:PORT" in lines[1]


def test_an_unknown_command_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = problems(capsys, "statsu")
    assert line == "disagg-router: error: unknown command statsu; did you mean status?"


def test_check_reports_problems_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*FLAGS, "--check"]) == 0
    assert capsys.readouterr().out == "the settings are valid\n"
    assert problems(capsys, *FLAGS, "--check", "--api-keys-file", str(tmp_path / "none"))


def test_check_refuses_a_misspelt_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISAGG_ROUTER_REQUEST_TIMOUT", "5")
    (line,) = problems(capsys, *FLAGS, "--check")
    assert "REQUEST_TIMOUT is not a setting; did you mean DISAGG_ROUTER_REQUEST_TIMEOUT?" in line


def test_the_printed_configuration_sets_the_same_settings_and_shows_no_secret(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = [*FLAGS, "--conversation-store=redis://:pa55@h", "--max-body-size=2MiB"]
    arguments += ["--group-weights=blue=9", "--admin-token=a-long-pa55-word", "--admin-port=1"]
    assert main([*arguments, "--print-config"]) == 0
    text = capsys.readouterr().out
    assert "pa55" not in text
    file = tmp_path / "router.yaml"
    file.write_text(text)
    again = load({"config": str(file)} | ENGINES)
    for name in ("prefillers", "max_body_size", "group_weights", "port"):
        assert getattr(again, name) == getattr(parsed(" ".join(arguments)), name)


def test_the_completion_script_is_valid_and_completes_options() -> None:
    script = subprocess.run(
        [sys.executable, "-m", "router.commands.cli", "completion", "bash"],
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    script += (
        'COMP_WORDS=(disagg-router --prefill-t); COMP_CWORD=1; _disagg_router; echo "$COMPREPLY"'
    )
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "--prefill-timeout\n"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("prot: 1", "prot (in the configuration file): not a setting; did you mean port?"),
        ("port: [1", "router.yaml"),
        ("- 1", "router.yaml"),
        ("config: other.yaml", "config"),
        ("port: x", "port"),
        ("1: 2", "1"),
    ],
)
def test_a_bad_file_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, complaint: str
) -> None:
    file = tmp_path / "router.yaml"
    file.write_text(content)
    (line,) = problems(capsys, *FLAGS, "--config", str(file))
    assert complaint in line


def test_a_bad_variable_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISAGG_ROUTER_PORT", "x")
    (line,) = problems(capsys, *FLAGS)
    assert "DISAGG_ROUTER_PORT" in line


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load(ENGINES).port = 1


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help-all"], ["serve", "--help"], ["demo", "--help"], ["--version"]):
        with pytest.raises(SystemExit) as left:
            main(arguments)
        assert left.value.code == 0
    shown = capsys.readouterr().out
    assert f"disagg-router {version('disagg-router')}" in shown
    for name in Settings.model_fields:
        assert "--" + name.replace("_", "-") in shown


def test_every_setting_has_a_title_and_a_help_text() -> None:
    for name in Settings.model_fields:
        assert group_title(name), name
        assert description_of(name), name


def test_the_command_itself_exits_with_2_and_no_traceback() -> None:
    command = [sys.executable, "-m", "router.commands.cli", "--port", "x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert all(line.startswith("disagg-router: error: ") for line in done.stderr.splitlines())


@pytest.mark.parametrize("name", ["prefill", "prefiller_hosts", "cors_origins"])
@pytest.mark.parametrize("text", ["user:pa55@h:8100", "u:pa55,pa55 pa55@h:8100", "u:pa55'55@h/v1"])
def test_password_in_an_address_is_not_shown(name: str, text: str) -> None:
    with pytest.raises(SettingsError) as raised:
        load(ENGINES | {name: f"http://{text}"})
    assert "pa55" not in str(raised.value)


def test_a_password_comes_from_a_flag_a_variable_or_a_file_but_not_from_two(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "password"
    file.write_text("from file\n")
    assert read_secret(load(ENGINES), "conversation_store_password") is None
    path = {"conversation_store_password_file": str(file)}
    assert read_secret(load(ENGINES | path), "conversation_store_password") == "from file"
    monkeypatch.setenv("DISAGG_ROUTER_CONVERSATION_STORE_PASSWORD", "from variable")
    settings = load(ENGINES)
    assert read_secret(settings, "conversation_store_password") == "from variable"
    assert "from variable" not in repr(settings)
    with pytest.raises(SettingsError):
        load(ENGINES | path)


def test_a_key_comes_from_a_flag_a_variable_or_a_file_of_several_but_not_from_two(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_text("\n the newer key, which signs \nthe older key, which is accepted\n")
    assert load(ENGINES).store_keys() == []
    path = {"conversation_store_key_file": str(file)}
    newer, older = load(ENGINES | path).store_keys()
    assert (newer, older) == (b"the newer key, which signs", b"the older key, which is accepted")
    monkeypatch.setenv("DISAGG_ROUTER_CONVERSATION_STORE_KEY", "from the variable")
    settings = load(ENGINES)
    assert settings.store_keys() == [b"from the variable"]
    assert "from the variable" not in repr(settings)
    with pytest.raises(SettingsError):
        load(ENGINES | path)


def test_a_shared_store_has_a_key_before_there_are_workers(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Theirs would be another each; and a file may change before one of them is replaced."""
    shared = ENGINES | {"conversation_store": "redis://h"}
    made = with_store_keys(load(shared))
    (key,) = made.store_keys()
    assert len(key) > 32
    assert with_store_keys(made).store_keys() == [key]
    assert [x.levelname for x in caplog.records] == ["WARNING"], "said once"
    assert key.decode() not in caplog.text
    assert with_store_keys(load(shared)).store_keys() != [key]
    file = tmp_path / "keys"
    file.write_text("a key of the operator's")
    read = with_store_keys(load(shared | {"conversation_store_key_file": str(file)}))
    file.unlink()
    assert read.store_keys() == [b"a key of the operator's"]
    assert with_store_keys(load(ENGINES)).store_keys() == [], "nobody else writes to memory"


@pytest.mark.parametrize("name", RENAMED)
def test_a_deprecated_name_works_as_flag_variable_and_key_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    current = RENAMED[name]
    flags = vars(parser().parse_args([*FLAGS, f"--{name.replace('_', '-')}", "3"]))
    assert getattr(load(flags), current) == 3
    (line,) = deprecation_warnings(load(flags), flags)
    assert line.startswith(f"--{name.replace('_', '-')} is deprecated")
    file = tmp_path / "router.yaml"
    file.write_text(f"{name.replace('_', '-')}: 4\n")
    settings = load(ENGINES | {"config": str(file)})
    assert getattr(settings, current) == 4
    (line,) = deprecation_warnings(settings, ENGINES)
    assert str(file) in line
    variable = f"DISAGG_ROUTER_{name.upper()}"
    monkeypatch.setenv(variable, "5")
    assert unknown_variables({variable: "5"}) == []
    assert getattr(load(ENGINES | {"config": str(file)}), current) == 5
    (line,) = deprecation_warnings(load(ENGINES), ENGINES)
    assert line.startswith(f"{variable} is deprecated")
    assert getattr(load(ENGINES | {name: 6, current: 7}), current) == 7


def test_a_bad_value_under_a_deprecated_name_is_reported_under_that_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (line,) = problems(capsys, *FLAGS, "--scatter", "99")
    assert line.startswith("disagg-router: error: --scatter: ")
    monkeypatch.setenv("DISAGG_ROUTER_SCATTER", "many")
    (line,) = problems(capsys, *FLAGS)
    assert line.startswith("disagg-router: error: DISAGG_ROUTER_SCATTER: ")
